from paceline.cli import main

main()
