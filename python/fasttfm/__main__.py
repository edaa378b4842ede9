from fasttfm.cli.main import main

raise SystemExit(main())
