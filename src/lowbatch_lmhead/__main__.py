"""``python -m lowbatch_lmhead``: the command line without its script on the PATH."""

import sys

from .cli import main

sys.exit(main())
