"""``python -m mamf`` is ``mamf``."""

import sys

from mamf.cli import main

sys.exit(main())
