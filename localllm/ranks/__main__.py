"""`python -m localllm.ranks` is one rank, started by a supervisor."""

from localllm.ranks.rank import Share, main


def torch_share() -> Share:
    """Return a share of a real model. This imports torch."""
    from localllm.ranks.share import TorchShare

    return TorchShare()


if __name__ == "__main__":
    main(torch_share)
