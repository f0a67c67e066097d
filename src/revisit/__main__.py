from revisit.cli.main import main

main()
