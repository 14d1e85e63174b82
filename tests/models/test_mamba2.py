"""A Mamba-2 layer with limits of the time step against transformers' own."""

import torch

from localllm.kernels.layer_cache import LayerState
from localllm.models.layers.linear import Linear
from localllm.models.layers.recurrent import Mamba2, ScanHeads
from tests.kernels.state_rows import Part, state_step
from tests.tiny import tiny_config


@torch.inference_mode()
def test_limits_of_the_time_step() -> None:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer

    torch.manual_seed(0)
    config = tiny_config("granite_hybrid", time_step_limit=(0.05, 0.1))
    theirs = GraniteMoeHybridMambaLayer(config, 0).eval()
    theirs.dt_bias.normal_()
    heads = ScanHeads(theirs.num_heads, theirs.head_dim, theirs.n_groups, theirs.ssm_state_size)
    ours = Mamba2(
        Linear(theirs.in_proj.weight), theirs.conv1d.weight, theirs.conv1d.bias, -theirs.A_log.exp(), theirs.dt_bias,
        theirs.D, theirs.norm.weight, theirs.layer_norm_epsilon, Linear(theirs.out_proj.weight), heads,
        limits=config.time_step_limit,
    )  # fmt: skip
    x = torch.randn(17, config.hidden_size)
    state = LayerState(
        torch.full((3, theirs.conv_dim, theirs.conv_kernel_size - 1), torch.nan),
        torch.full((3, heads.heads, heads.head_dim, heads.state_size), torch.nan),
    )
    parts = [ours(x[:9], state, state_step([Part(0, 9, -1, 1)], x.device))]
    parts += [ours(x[9:], state, state_step([Part(0, 8, 1, 2)], x.device))]
    torch.testing.assert_close(torch.cat(parts), theirs(x[None])[0], rtol=1e-4, atol=1e-5)
