"""Run ``mamf`` as ``python -m mamf``."""

from mamf.cli import main

raise SystemExit(main())
