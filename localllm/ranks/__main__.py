"""`python -m localllm.ranks` is one rank, started by a supervisor."""

from localllm.ranks.rank import main

if __name__ == "__main__":
    main()
