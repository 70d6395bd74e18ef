"""Run ``mamf`` as ``python -m mamf``."""

try:
    from mamf.cli import main

    exit_code = main()
except KeyboardInterrupt:  # during the import
    exit_code = 130
raise SystemExit(exit_code)
