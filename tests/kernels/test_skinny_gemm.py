"""x W^T + b for every kind of weight, number of rows and way of splitting, against float64."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from localllm.kernels import skinny_gemm as file
from localllm.kernels import unpack_bytes
from localllm.kernels.gated import ACTIVATIONS, gated
from localllm.kernels.launch import HAS_TRITON, INTERPRETED, DeviceFeatures, LaunchOptions, launching_with
from localllm.kernels.quantized_weight import dequantized
from localllm.kernels.skinny_gemm import SkinnyGemmTile, SkinnyProduct, skinny_gemm, skinny_gemm_unfinished
from tests.kernels.conftest import DTYPES
from tests.kernels.harness import ERROR, e4m3, exact_weight

needs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="the twin finishes its products"
)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, *quantisation: Tensor | None) -> Tensor:
    out = skinny_gemm(x, weight, bias, *quantisation)
    meant = exact_weight(weight, *quantisation)
    wanted = x.double() @ meant.t()
    magnitude = x.double().abs() @ meant.abs().t()
    if bias is not None:
        wanted, magnitude = wanted + bias.double(), magnitude + bias.double().abs()
    assert (out.shape, out.dtype) == (wanted.shape, x.dtype)
    bound = 4e-7 * magnitude + ERROR[x.dtype] * wanted.abs() + 1e-7
    assert ((out.double() - wanted).abs() <= bound).all()
    return out


def tensors(rows: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows + n + k)
    x = torch.randn(rows, k).to(device, dtype)
    return x, torch.randn(n, k).to(device, dtype), torch.randn(n).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 128), (3, 33, 257), (17, 100, 64), (63, 70, 96), (64, 8, 8), (65, 40, 130)])
def test_float_weight(shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    x, weight, bias = tensors(*shape, dtype, device)
    check(x, weight, bias if with_bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 130, 256), (5, 33, 130), (33, 40, 384), (3, 20, 63)])
@pytest.mark.parametrize("per", ["channel", "block", "group"])
def test_e4m3_weight(per: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, n, k = shape
    x, _, bias = tensors(rows, n, k, dtype, device)
    scales = torch.rand((n,) if per == "channel" else (-(-n // 128), -(-k // 128)), device=device) / 448
    check(x, e4m3(n, k, device), bias, powers(n, k, device) if per == "group" else scales)


def powers(n: int, k: int, device: torch.device) -> Tensor:
    """Scales of groups of 32 inputs, no two neighbours alike."""
    return torch.randint(115, 122, (n, -(-k // 32)), dtype=torch.uint8).to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 130, 256), (5, 33, 130), (33, 40, 384), (3, 20, 63)])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_int8_weight(with_zeros: bool, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, n, k = shape
    x, _, bias = tensors(rows, n, k, dtype, device)
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8).to(device)
    zeros = torch.randint(-128, 128, (n,), dtype=torch.int8).to(device) if with_zeros else None
    check(x, weight, bias, torch.rand(n, device=device) / 128, zeros)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [2, 4])
def test_splits_of_k_add_up(
    split: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last split is short, and where one has nothing to do."""
    monkeypatch.setattr(file, "settings_for", lambda *_: SkinnyGemmTile(16, 32, 32, split, 4, 2))
    for k in (128, 32 * 5 + 2):
        x, weight, bias = tensors(3, 45, k, dtype, device)
        check(x, weight, bias)
        check(x, torch.randint(-128, 128, (45, k), dtype=torch.int8).to(device), bias, torch.rand(45, device=device))


@pytest.mark.parametrize(("rows", "tile"), [
    (33, SkinnyGemmTile(64, 128, 64, 2, 8, 4)),
    (20, SkinnyGemmTile(32, 128, 128, 1, 8, 4)),
])  # fmt: skip
def test_tiles_of_128_rows(
    rows: int, tile: SkinnyGemmTile, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on sm_90, of which the interpreter knows nothing; also where N and K end within a tile."""
    monkeypatch.setattr(file, "settings_for", lambda *_: tile)
    n, k = 200, 300
    x, weight, bias = tensors(rows, n, k, torch.float16, device)
    check(x, weight, bias)
    check(x, e4m3(n, k, device), bias, torch.rand(n, device=device) / 448)
    if tile.split_k == 1:
        check(x, e4m3(n, k, device), bias, torch.rand(2, 3, device=device) / 448)


@settings(max_examples=10 if INTERPRETED else 40, deadline=None)
@given(
    rows=st.integers(0, 70),
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    kind=st.sampled_from(["float", "e4m3", "int8"]),
)
def test_any_shape(rows: int, n: int, k: int, kind: str) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
    x, weight, bias = tensors(rows, n, k, torch.float16, device)
    if kind == "float":
        check(x, weight, bias)
    else:
        check(
            x, e4m3(n, k, device) if kind == "e4m3" else weight.to(torch.int8), bias, torch.rand(n, device=device) / 448
        )


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy's, when interpreted
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "TMA"])
@pytest.mark.parametrize("kind", ["float", "e4m3", "e4m3 by block", "e4m3 by group", "int8"])
def test_a_gated_activation_has_the_bits_of_its_own_kernel(
    kind: str, tma: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the tiles of gate and up end within a tile: the next rows after gate's last are up's."""
    if INTERPRETED:
        monkeypatch.setattr(file, "device_features", lambda _: DeviceFeatures(90, tma, False))
    monkeypatch.setattr(file, "settings_for", lambda *_: SkinnyGemmTile(16, 64, 64, 1, 4, 2))
    width, k = {"e4m3 by block": (128, 192), "float": (83, 136)}.get(kind, (83, 160))
    x, weight, bias = tensors(5, 2 * width, k, torch.float16, device)
    arguments: tuple[Tensor | None, ...] = (weight, bias)
    if kind == "e4m3":
        arguments = (e4m3(2 * width, k, device), bias, torch.rand(2 * width, device=device) / 448)
    elif kind == "e4m3 by block":
        arguments = (e4m3(2 * width, k, device), bias, torch.rand(2, 2, device=device) / 448)
    elif kind == "e4m3 by group":
        arguments = (e4m3(2 * width, k, device), bias, powers(2 * width, k, device))
    elif kind == "int8":
        zeros = torch.randint(-8, 8, (2 * width,), dtype=torch.int8).to(device)
        arguments = (weight.to(torch.int8), None, torch.rand(2 * width, device=device), zeros)
    with launching_with(LaunchOptions(programmatic_launch=False)):
        for activation in ACTIVATIONS:
            product = skinny_gemm_unfinished(x, *arguments)
            assert isinstance(product, SkinnyProduct)
            fused = product.gated(activation)
            assert fused is not None
            assert torch.equal(fused, gated(check(x, *arguments), activation))


@needs_kernels
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_gate_and_up_in_one_block_of_scales_take_two_kernels(device: torch.device) -> None:
    x, _, bias = tensors(3, 192, 128, torch.float16, device)
    weight, scales = e4m3(192, 128, device), torch.rand(2, 1, device=device) / 448
    product = skinny_gemm_unfinished(x, weight, bias, scales)
    assert isinstance(product, SkinnyProduct)
    assert product.gated("silu") is None
    assert torch.equal(gated(product, "silu"), gated(product.whole(), "silu"))


def test_rows_and_weights_that_lie_apart(device: torch.device) -> None:
    wide, weight, bias = tensors(6, 40, 160, torch.float16, device)
    check(wide[::2, :128], weight[:, 16:144], bias)
    check(wide.t()[:6, :6], weight[:, :6], bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("deterministic")
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows take the splits side by side, many one after another."""
    monkeypatch.setattr(file, "SERIAL_ROWS", 100)
    n, k = 24, 96 if dtype == torch.float32 else 512  # fp32 is not split
    x, weight, bias = tensors(130, n, k, dtype, device)
    if INTERPRETED or device.type == "cuda":
        assert dtype == torch.float32 or file._deterministic_tile(n, k, 2, False).split_k > 1
    weights: list[tuple[Tensor, ...]] = [(weight, bias)]
    weights += [(weight.to(torch.int8), bias, torch.rand(n, device=device))]
    for arguments in weights:
        everyone = check(x, *arguments)
        for some in (slice(0, 1), slice(77, 78), slice(60, 70), slice(5, 90), slice(5, 125)):
            alone = skinny_gemm(x[some].clone(), *arguments)
            if INTERPRETED or device.type == "cuda":  # the twins leave the order of sums to torch
                assert torch.equal(alone, everyone[some])


def test_garbage_in_one_row_stays_there(device: torch.device) -> None:
    x, weight, bias = tensors(5, 40, 100, torch.float16, device)
    clean = skinny_gemm(x, weight, bias)
    x[2] = float("nan")
    out = skinny_gemm(x, weight, bias)
    assert out[2].isnan().all()
    torch.testing.assert_close(out[[0, 1, 3, 4]], clean[[0, 1, 3, 4]], rtol=0, atol=0)


def test_dequantized_is_what_the_product_means(device: torch.device) -> None:
    n, k = 5000, 200  # more than one block of rows
    scales = torch.rand(-(-n // 128), -(-k // 128), device=device)
    weight = e4m3(n, k, device)
    torch.testing.assert_close(
        dequantized(weight, scales, None, torch.float32).double(), exact_weight(weight, scales), rtol=1e-6, atol=0
    )


@pytest.mark.skipif(not HAS_TRITON, reason="the texts are Triton's constants")
@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k in ("e4m3", "int8") for d in ("fp16", "bf16")])
def test_ptx_unpacks_every_byte_exactly(kind: str, dtype: str) -> None:
    """The texts that compiled kernels hold, run in Python on all pairs of bytes."""
    low, high = torch.arange(256).repeat(256), torch.arange(256).repeat_interleave(256)
    words = low + (high << 8)
    text = getattr(unpack_bytes, f"{kind.upper()}_TO_{dtype.upper()}").value
    outputs = run_ptx(text, words | (words.flip(0) << 16))
    for byte, out in zip((low, high), outputs, strict=True):
        for half, bits in ((byte, out & 0xFFFF), (byte.flip(0), out >> 16)):
            values = bits.to(torch.uint16).view({"fp16": torch.float16, "bf16": torch.bfloat16}[dtype])
            meant = half.to(torch.uint8).view({"e4m3": torch.float8_e4m3fn, "int8": torch.int8}[kind]).float()
            assert torch.equal(values.float()[meant.isfinite()], meant[meant.isfinite()])


def run_ptx(text: str, words: Tensor) -> tuple[Tensor, Tensor]:
    """What `text` leaves in $0 and $1 where $2 holds `words`, 32 bits each in int64."""
    registers: dict[str, Tensor] = {"$2": words}

    def read(name: str) -> Tensor:
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def on_halves(operation: Callable[..., Tensor], dtype: torch.dtype, names: list[str]) -> Tensor:
        """In float64, which holds exactly what two halves make; rounded once, as the instruction does."""
        both = []
        for shift in (0, 16):
            halves = [((read(n) >> shift) & 0xFFFF).to(torch.uint16).view(dtype).double() for n in names]
            both.append(operation(*halves).to(dtype).view(torch.uint16).to(torch.int64))
        return both[0] | (both[1] << 16)

    for statement in text.strip(" {}").split(";"):
        opcode, *operands = re.split(r"[\s,]+", statement.strip())
        if opcode in ("", ".reg"):
            continue
        to, *names = operands
        match opcode:
            case "mov.b32":
                value = read(names[0])
            case "shl.b32":
                value = (read(names[0]) << int(names[1])) & 0xFFFFFFFF
            case "shr.u32":
                value = read(names[0]) >> int(names[1])
            case "and.b32":
                value = read(names[0]) & read(names[1])
            case "xor.b32":
                value = read(names[0]) ^ read(names[1])
            case "lop3.b32":
                assert names.pop() == "0xEA", "(a & b) | c"
                value = (read(names[0]) & read(names[1])) | read(names[2])
            case "mul.f16x2":
                value = on_halves(torch.mul, torch.float16, names)
            case "sub.f16x2":
                value = on_halves(torch.sub, torch.float16, names)
            case "fma.rn.bf16x2":
                value = on_halves(lambda a, b, c: a * b + c, torch.bfloat16, names)
            case _:
                raise AssertionError(f"{opcode} is not known here")
        registers[to] = value
    return registers["$0"], registers["$1"]
