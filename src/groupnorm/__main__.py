"""``python -m groupnorm`` is the command ``groupnorm``."""

import sys

from groupnorm.cli import main

sys.exit(main())
