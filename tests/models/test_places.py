"""Which place runs a model: never a slower one than another that fits, and the speeds that are told before a load."""

import time
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localllm.config.settings import EngineConfig
from localllm.errors import DoesNotFit, LocalLLMError
from localllm.machine.hardware import Hardware, Speeds
from localllm.machine.links import Place
from localllm.models.fit import MemoryPlan, estimate, plan_memory
from localllm.models.fit.far import CROSSING_S, GPU_SHARE, RAM_SHARE, CheckpointBytes, LayerExperts, quickest_layers
from localllm.models.fit.speed import PlanSpeeds, predict
from localllm.models.library.pick_list import read_picks
from localllm.models.read_spec import spec_of_config
from localllm.models.spec.model_spec import ModelSpec
from localllm.serving.build import require_context
from localllm.serving.served import LoadLimits
from tests.draws import draws
from tests.marks import needs_library
from tests.models.harness import GIB, LLAMA_8B, WEIGHTS, gpu_machine
from tests.models.large_models import DEEPSEEK_V3, GPT_OSS_120B, QWEN3_235B, G, desk, sized

pytestmark = needs_library

FIXED = {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
         "vocab_size": 32_000, "max_position_embeddings": 16_384, "tie_word_embeddings": True}  # fmt: skip


def plan(spec: ModelSpec, sizes: CheckpointBytes | None, machine: Hardware, **asked: Any) -> MemoryPlan:
    weights = 10 * GIB if sizes is not None else WEIGHTS[spec.architecture]
    return plan_memory(EngineConfig(**asked), spec, weights, machine, resident_bytes=sizes)


def speed(plan: MemoryPlan, machine: Hardware) -> PlanSpeeds:
    found = predict(plan, machine)
    assert found is not None
    return found


# ---- the choice ------------------------------------------------------------------------------------------------------


def test_a_dense_model_that_the_gpu_does_not_hold_runs_on_the_cpu_unless_that_is_too_slow() -> None:
    machine = replace(desk(64), gpus=gpu_machine(11, 12).gpus)
    made = plan(LLAMA_8B, None, machine)
    assert made.place == "cpu"
    assert any("The GPU does not hold this model: it runs on the CPU, " in note for note in made.notes)
    crawling = replace(machine, speeds=Speeds(ram=4 * G))
    assert speed(plan(LLAMA_8B, None, crawling, device="cpu"), crawling).decode[1] < 1
    with pytest.raises(DoesNotFit, match="does not fit on Card"):
        plan(LLAMA_8B, None, crawling)
    for asked in (
        {"device": "cuda"},
        {"max_model_len": 8192, "gpu_memory_utilization": 0.5},
        {"tensor_parallel_size": 1},
    ):
        with pytest.raises(DoesNotFit, match="on Card"):  # what names a GPU, or asks for less of it, is not overruled
            plan(LLAMA_8B, None, machine, **asked)
    with pytest.raises(DoesNotFit, match="context of 100,000 tokens does not fit on Card"):
        plan(LLAMA_8B, None, desk(64), max_model_len=100_000)  # there are flags that help more than the CPU


@pytest.mark.parametrize(("gpu_bandwidth", "multiplies", "place"), [(900, 36e12, "cuda:0"), (60, 36e12, "cpu"),
                                                                    (60, None, "cpu"), (300, 1e12, "cpu")])  # fmt: skip
def test_a_gpu_with_slower_memory_than_ram_is_left_if_answers_come_earlier(
    gpu_bandwidth: float, multiplies: float | None, place: str
) -> None:
    machine = desk(64, ram=200 * G, narrow=6e12, wide=4e12)
    card = replace(machine.gpus[0], place=Place(bandwidth=gpu_bandwidth * G, multiplies=multiplies))
    machine = replace(machine, gpus=(card,))
    made = plan(LLAMA_8B, None, machine)
    assert made.place == place
    other = plan(LLAMA_8B, None, machine, device="cpu" if place != "cpu" else "cuda:0")
    if multiplies is not None:
        assert speed(made, machine).answer_s < speed(other, machine).answer_s


def test_the_disk_is_chosen_last_and_only_at_one_token_a_second() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = sized(spec, 4.25, 3.07 * G)
    quick, slow = desk(32, disk=3 * G), desk(32, disk=0.2 * G)
    for machine, place in ((quick, "cuda:0 + disk"), (replace(quick, gpus=()), "cpu + disk")):
        made = plan(spec, sizes, machine)
        assert made.place == place
        assert speed(made, machine).decode[0] >= 1
        assert any("are on disk" in note for note in made.notes)
        with pytest.raises(DoesNotFit):
            plan(spec, sizes, machine, weights_on="ram")
    for machine in (slow, desk(32)):  # too slow, or not measured: only in so many words
        with pytest.raises(DoesNotFit) as caught:
            plan(spec, sizes, machine)
        assert "--weights-on disk" in caught.value.hint
        assert plan(spec, sizes, machine, weights_on="disk").place == "cuda:0 + disk"
    assert plan(spec, sizes, desk(96, disk=3 * G)).place == "cuda:0 + RAM"


# ---- which layers ----------------------------------------------------------------------------------------------------

layer_sizes = st.lists(
    st.tuples(st.integers(60, 140).map(lambda size: size * 10**6), st.sampled_from([1.0, 1.1, 1.7])),
    min_size=1, max_size=6,
)  # fmt: skip


@draws(60)
@given(sizes=layer_sizes, share=st.floats(0.01, 1.0), more=st.floats(0.0, 0.5), used=st.floats(0.01, 0.5))
def test_no_set_of_layers_is_faster_and_a_larger_budget_is_never_slower(
    sizes: list[tuple[int, float]], share: float, more: float, used: float
) -> None:
    """Brute force over all sets of up to six layers, whose sizes differ on the GPU and in RAM."""
    experts = [LayerExperts(layer, size, int(size * wider)) for layer, (size, wider) in enumerate(sizes)]
    whole = sum(each.gpu_bytes for each in experts)

    def token_s_of(each: LayerExperts) -> float:
        return used * (each.ram_bytes / (RAM_SHARE * 77 * G) - each.gpu_bytes / (GPU_SHARE * 936 * G)) + CROSSING_S

    def cost(layers: tuple[int, ...]) -> float:
        return sum(token_s_of(experts[layer]) for layer in layers)

    def freed(layers: tuple[int, ...]) -> int:
        return sum(experts[layer].gpu_bytes for layer in layers)

    def chosen(least_bytes: int) -> tuple[int, ...]:
        found = quickest_layers(experts, least_bytes, token_s_of)
        assert freed(found) >= least_bytes
        sets = (some for count in range(len(experts) + 1) for some in combinations(range(len(experts)), count))
        best = min(cost(some) for some in sets if freed(some) >= least_bytes)
        rest_s = 0.003
        assert rest_s + cost(found) <= 1.03 * (rest_s + best)
        return found

    missing = max(1, int(whole * share))
    tight, roomy = chosen(missing), chosen(int(missing * (1 - more)))
    assert cost(roomy) <= cost(tight) + 1e-12
    if len({each[1:] for each in experts}) == 1:
        assert tight == tuple(range(len(experts) - len(tight), len(experts)))
        assert set(roomy) <= set(tight)


@draws(12)
@given(sizes=st.lists(st.sampled_from([250, 300, 450]), min_size=2, max_size=6), free=st.integers(0, 100),
       more=st.integers(0, 30))  # fmt: skip
def test_a_plan_with_layers_of_several_sizes_never_exceeds_and_never_slows_with_memory(
    sizes: list[int], free: int, more: int
) -> None:
    spec = spec_of_config({
        **FIXED, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": len(sizes),
        "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 512, "intermediate_size": 4096,
    })  # fmt: skip
    experts = [LayerExperts(layer, size << 20, int(1.1 * size) << 20) for layer, size in enumerate(sizes)]
    whole = (500 << 20) + sum(each.gpu_bytes for each in experts)
    resident = CheckpointBytes(lambda *given: whole, lambda *given: experts)

    def answer_s(free_gib: float, prompts: str = "off") -> float:
        machine = desk(64, free_gib)
        try:
            made = plan(spec, resident, machine, device="cuda:0", stream_prompts=prompts)
        except DoesNotFit:
            return float("inf")
        assert made.total_bytes + made.reserve_bytes <= made.free_bytes
        assert made.max_model_len >= 8192
        return 1 / speed(made, machine).streams[1]

    least = 2.2 + 1.6 * free / 100
    assert answer_s(least + more / 20) <= answer_s(least) * (1 + 1e-9)
    assert answer_s(least, "auto") < float("inf") or answer_s(least) == float("inf")


# ---- plans of real models on real machines ---------------------------------------------------------------------------

LARGE = {
    "gpt-oss-120b": (GPT_OSS_120B, 4.25, 3.07 * G), "Qwen3-235B-A22B": (QWEN3_235B, 4.85, 15.6e9 * 4.85 / 8),
    "DeepSeek-V3": (DEEPSEEK_V3, 4.85, 17e9 * 4.85 / 8),
}  # fmt: skip
SLOW = (replace(desk(96).gpus[0], place=Place(bandwidth=100 * G, multiplies=5e12)),)
MACHINES = {
    "laptop": replace(desk(16, ram=40 * G, narrow=3e11, wide=1e11), gpus=()),
    "desktop": replace(desk(64), gpus=()),
    "desktop, nothing measured": replace(desk(64), gpus=(), speeds=Speeds()),
    "8 GB": desk(16, 7.2), "12 GB": desk(32, 11.0), "12 GB, disk": desk(32, 11.0, disk=3 * G), "16 GB": desk(64, 15.0),
    "24 GB, 64": desk(64), "24 GB, 192": desk(192), "24 GB, nothing measured": replace(desk(96), speeds=Speeds()),
    "slow GPU": replace(desk(96, ram=300 * G), gpus=SLOW), "server": replace(desk(512, ram=200 * G), gpus=()),
    "48 GB": desk(256, 46.0),
}  # fmt: skip


def places_of(name: str) -> tuple[ModelSpec, Any]:
    """Return a model's spec, and what plans it with settings on a machine."""
    if name in LARGE:
        config, bits, rest = LARGE[name]
        spec = spec_of_config(config)
        sizes = sized(spec, bits, rest)
        return spec, lambda config, machine: plan_memory(config, spec, 10 * GIB, machine, resident_bytes=sizes)
    pick = next(each for each in read_picks().picks if each.name == name)
    return pick.spec, pick.plan


@pytest.mark.parametrize("machine", MACHINES)
def test_no_plan_is_slower_than_another_that_fits(machine: str) -> None:
    """The suggested models and three large ones: what is chosen answers no later than any place that is named."""
    hardware, plans = MACHINES[machine], 0
    for name in [*LARGE, *(each.name for each in read_picks().picks)]:
        spec, planned = places_of(name)
        found = {}
        for device, on in ("auto", "auto"), ("cpu", "ram"), *([("cuda:0", "ram")] if hardware.gpus else []):
            with suppress(LocalLLMError):
                found[device, on] = planned(EngineConfig(device=device, weights_on=on), hardware)
        for each in found.values():
            assert each.total_bytes + each.reserve_bytes <= each.free_bytes, name
            if each.far is not None:
                held = each.far.ram_bytes + (each.total_bytes if each.device == "cpu" else 0)
                assert held <= hardware.ram_available_bytes, name
        chosen = found.get(("auto", "auto"))
        if chosen is None:
            speeds = [predict(each, hardware) for each in found.values()]
            assert all(each is not None and each.decode[1] < 1 for each in speeds), name
            continue
        plans += 1
        mine = predict(chosen, hardware)
        useful = min(8192, spec.max_position)
        for each in found.values():
            other = predict(each, hardware)
            if mine is None or other is None or (each.max_model_len < useful <= chosen.max_model_len):
                continue  # a useful context goes before speed
            assert mine.answer_s <= other.answer_s * 1.001, (name, chosen.place, each.place)
    assert plans > 3


# ---- the speeds ------------------------------------------------------------------------------------------------------


def test_fit_says_what_goes_where_and_how_fast() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    found = estimate(EngineConfig(), spec, 10 * GIB, desk(96), sized(spec, 4.25, 3.07 * G))
    shown = found[0].speed
    assert shown is not None
    assert set(shown.first_token_s) == {1000, 8000}
    assert shown.first_token_s[1000] < shown.first_token_s[8000] < 10 * shown.first_token_s[1000]
    one, four, eight = (shown.streams[rows] for rows in (1, 4, 8))
    assert one > four > eight
    assert 1.0 <= 8 * eight / one <= 1.6  # together little faster than one
    assert "GB/s of RAM in" in shown.why
    assert "; a prompt of 8,000 tokens about " in shown.words()
    assert " answers at once about " in shown.words()
    alone = found[-1].speed
    assert alone is not None
    assert found[-1].device == "cpu"
    assert alone.decode[1] < shown.decode[1]


def test_long_prompts_take_the_time_of_a_copy_where_that_is_shorter() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    machine = desk(96)
    [card] = machine.gpus
    linked = replace(machine, gpus=(replace(card, place=replace(card.place, link=31.5 * G)),))
    made = plan(spec, sized(spec, 4.25, 3.07 * G), linked)
    assert made.far is not None
    assert made.max_num_batched_tokens == 8192
    computed, copied = speed(made, machine), speed(made, linked)
    copy_s = made.far.ram_bytes / (0.79 * 31.5 * G)
    assert copy_s < copied.first_token_s[8000] < 3 * copy_s < computed.first_token_s[8000]
    assert copied.streams == computed.streams
    stays = plan(spec, sized(spec, 4.25, 3.07 * G), linked, stream_prompts="off")
    assert speed(stays, linked).first_token_s == speed(stays, machine).first_token_s


def test_three_placements_trade_context_for_speed() -> None:
    """From the longest context to the fastest answers, each a plan that its flag makes."""
    spec = spec_of_config(GPT_OSS_120B)
    sizes = sized(spec, 4.25, 3.07 * G)
    found = estimate(EngineConfig(), spec, 10 * GIB, desk(96), sizes)[0]
    names = [each.cost.partition(":")[0] for each in found.placements]
    assert names == ["longest context", "balanced", "fastest"]
    longest, balanced, fastest = (each.plan for each in found.placements)
    assert fastest == found.plan
    assert longest.max_model_len == spec.max_position
    assert fastest.max_model_len < 32_768 <= balanced.max_model_len < longest.max_model_len
    speeds = [speed(each.plan, desk(96)).streams[1] for each in found.placements]
    assert speeds == sorted(speeds)
    for each in found.placements:
        made = plan(spec, sizes, desk(96), n_cpu_moe=each.changes["n_cpu_moe"])
        assert made.max_model_len == each.context
        assert " tokens/s" in each.cost
    fewer = plan(spec, sizes, desk(96), n_cpu_moe=str(int(found.placements[0].changes["n_cpu_moe"]) - 1))
    assert fewer.max_model_len < spec.max_position  # no layer more than that context needs
    for asked in ({"n_cpu_moe": "30"}, {"max_model_len": 8192}, {"device": "cpu"}):
        assert estimate(EngineConfig(**asked), spec, 10 * GIB, desk(96), sizes)[0].placements == ()


def test_more_layers_in_ram_are_an_alternative_with_their_speed() -> None:
    spec = spec_of_config(GPT_OSS_120B)
    sizes = sized(spec, 4.25, 3.07 * G)
    with pytest.raises(DoesNotFit) as caught:
        plan(spec, sizes, desk(96), n_cpu_moe="12")
    words = {option.words: option.cost for option in caught.value.options}
    more = next(each for each in words if each.startswith("--n-cpu-moe") and "auto" not in each)
    assert words[more].startswith("more layers in RAM: ")
    assert words[more].endswith(" tokens/s")
    flags = list(words)
    quantised = [flags.index(each) for each in flags if "--quantization" in each]
    assert all(flags.index(more) < each for each in quantised)


def test_several_answers_read_shared_weights_once_and_experts_almost_each_for_itself() -> None:
    """The factors of the reference for eight answers: 7.2 for gpt-oss-120b, 6.5 for Qwen3-235B, if chosen evenly."""
    for config, bits, rest, factor in ((GPT_OSS_120B, 4.25, 3.07 * G, 7.2), (QWEN3_235B, 4.85, 9.5 * G, 6.5)):
        spec = spec_of_config(config)
        work = plan(spec, sized(spec, bits, rest), desk(256)).work
        assert work is not None
        assert work.distinct(1) == pytest.approx(1)
        assert work.distinct(8) == pytest.approx(factor, rel=0.03)
        assert work.distinct(10**6) == pytest.approx(1 / work.chosen_share)


def test_multiplications_bound_prompts_and_many_answers() -> None:
    machine = replace(desk(64), gpus=())
    made = plan(LLAMA_8B, None, machine)
    weak = replace(machine, speeds=machine.speeds._replace(wide=1e10))
    assert speed(made, weak).first_token_s[1000] > 20 * speed(made, machine).first_token_s[1000]
    assert speed(made, weak).streams[8] < speed(made, machine).streams[8]
    unknown = speed(made, replace(machine, speeds=Speeds(ram=77 * G)))
    assert (unknown.prompt, unknown.first_token_s) == (None, {})
    prompt_s = 1000 * 6.98e9 / (0.6 * 0.4e12)
    assert speed(made, machine).first_token_s[1000] == pytest.approx(prompt_s, rel=0.15)


def test_a_plan_and_its_speeds_take_a_third_of_a_second_for_94_layers() -> None:
    spec = spec_of_config(QWEN3_235B)
    sizes = sized(spec, 4.85, 15.6e9 * 4.85 / 8)
    uneven = [each._replace(gpu_bytes=each.gpu_bytes - each.layer % 3 * 10**7) for each in sizes.experts("", "", None)]
    mixed = CheckpointBytes(sizes.whole, lambda *given: uneven)
    times = []
    for resident in (sizes, mixed, mixed):
        begun_s = time.process_time()
        made = plan(spec, resident, desk(192))
        predict(made, desk(192))
        times.append(time.process_time() - begun_s)
        assert made.far is not None
    assert min(times[1:]) < 0.3


# ---- beside other models ---------------------------------------------------------------------------------------------


def test_models_that_nobody_uses_leave_the_gpu_before_another_goes_to_the_cpu() -> None:
    made = plan(LLAMA_8B, None, replace(desk(64), gpus=gpu_machine(11, 12).gpus))
    assert made.device == "cpu"
    idle = LoadLimits(min_context=4096)
    with pytest.raises(DoesNotFit, match="fits only on the CPU"):
        require_context(made, LLAMA_8B, EngineConfig(), idle, num_gpus=1)
    require_context(made, LLAMA_8B, EngineConfig(), LoadLimits(), num_gpus=1)  # there is none to unload
    require_context(made, LLAMA_8B, EngineConfig(device="cpu"), idle, num_gpus=1)
    require_context(made, LLAMA_8B, EngineConfig(), idle, num_gpus=0)
