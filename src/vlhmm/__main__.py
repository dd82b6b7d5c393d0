"""`python -m vlhmm`, the same as `vlhmm`."""

import sys

from vlhmm.cli.main import main

sys.exit(main())
