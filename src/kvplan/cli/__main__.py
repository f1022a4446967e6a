"""``python -m kvplan.cli`` is ``kvplan`` too. Nothing else lives here."""

from kvplan.cli.app import main

if __name__ == "__main__":
    main()
