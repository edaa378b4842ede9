from fasttfm.cli import main

raise SystemExit(main())
