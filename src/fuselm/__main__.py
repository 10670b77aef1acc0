"""`python -m fuselm` is the `fuselm` command; it knows nothing beyond that."""

from fuselm.cli import main

if __name__ == "__main__":
    main()
