"""The measured process: the engine by itself (`alone`), or the real server around it.

    python -m scripts.stream_bench.server alone|server PACE      # prints the port and the id of the engine's thread,
                                                                 # then serves until it is ended

The paced model uses the demo model's tokenizer; no weights are loaded for it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import uvloop

from localllm.config.settings import EngineConfig, ServerConfig, Settings
from localllm.engine.admission import Admission, ModelLimits
from localllm.engine.client import EngineClient
from localllm.engine.loop import EngineLoop
from localllm.engine.params import SamplingParams
from localllm.engine.request import Request
from localllm.fleet.replicas import ReplicaLoops
from localllm.machine.hardware import read_hardware
from localllm.machine.processes import set_thread_environment
from localllm.models.fit import plan_memory
from localllm.models.library.catalog import resolve_model
from localllm.models.read_spec import read_spec, weights_bytes
from localllm.serving.build import build_engine
from localllm.serving.manager import ModelManager
from localllm.serving.served import ServedModel
from localllm.text.chat_template import ChatTemplate
from localllm.text.tokenizer import load_tokenizer
from localllm.web.app import Server, bind, create_app
from scripts.stream_bench.paced import (
    MAX_MODEL_LEN,
    MeteredRunner,
    Pace,
    num_blocks,
    paced_loop,
    settle_memory,
)

PROMPT_LEN = 64


def main() -> None:
    mode, pace = sys.argv[1], Pace.read(sys.argv[2])
    if mode == "alone":
        run_alone(pace)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(pace))


def run_alone(pace: Pace) -> None:
    """Run the same batch without readers and without anything else in the process."""
    loop = served_model(pace).loop
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts = random.Random(0)
    loop.submit(
        *(
            Request(
                f"alone-{index}",
                [prompts.randrange(500) for _ in range(PROMPT_LEN + index % pace.block_size)],
                params,
                max_output_tokens=pace.max_model_len - PROMPT_LEN - pace.block_size,
            )
            for index in range(pace.num_rows)
        )
    )
    settle_memory()
    loop.start()
    print(0, 0, flush=True)
    while loop.is_running:
        time.sleep(1)


async def serve(pace: Pace) -> None:
    model = served_model(pace)
    await model.client.start()
    settings = Settings(server=ServerConfig(port=0))
    manager = ModelManager()
    socket = bind(settings.server)
    server = Server(create_app(manager, settings), drain_s=0.1)
    manager.adopt(model)
    settle_memory()
    engine_thread = next(thread for thread in threading.enumerate() if thread.name == "localllm-engine")
    print(socket.getsockname()[1], engine_thread.native_id, flush=True)
    await server.serve([socket])


def served_model(pace: Pace) -> ServedModel:
    if pace.model:
        return real_model(pace)
    found = resolve_model("demo")
    spec, tokenizer = read_spec(found.path), load_tokenizer(found.path)
    config = EngineConfig(device="cpu", max_model_len=MAX_MODEL_LEN, block_size=pace.block_size)
    plan = plan_memory(config, spec, weights_bytes(found.path), read_hardware())
    loop = paced_loop(pace)
    if pace.replicas:
        loop = cast("EngineLoop", behind_the_router(pace, loop))
    admission = Admission(ModelLimits(pace.max_model_len, spec.vocab_size, spec.eos_token_ids), tokenizer)
    return ServedModel(
        name="paced",
        path=found.path,
        spec=spec,
        plan=replace(plan, num_blocks=(num_blocks(pace),), max_num_seqs=pace.num_rows, async_depth=pace.depth),
        tokenizer=tokenizer,
        chat_template=ChatTemplate.of(tokenizer),
        client=EngineClient(loop, admission, tokenizer),
        created_s=time.time(),
        loop=loop,
        admission=admission,
        sampling_defaults={},
        max_num_queued_reqs=1024,
    )


def behind_the_router(pace: Pace, first: EngineLoop) -> ReplicaLoops:
    """Return several paced engines as the replicas of one model. The first one is measured."""
    loops = [first, *(paced_loop(replace(pace, report="")) for _ in range(1, pace.replicas))]
    engines = [SimpleNamespace(engine=(loop, None), loop=loop, close=loop.runner.close) for loop in loops]
    models = cast("list[ServedModel]", engines)
    return ReplicaLoops(models, lambda number: models[number], pace.policy)


def real_model(pace: Pace) -> ServedModel:
    """Load a model as `localllm up` does, on a thread that ends."""
    set_thread_environment()
    config = EngineConfig(model=pace.model, device="cpu", max_model_len=MAX_MODEL_LEN, max_num_seqs=pace.num_rows)
    with ThreadPoolExecutor(1) as loader:
        model = loader.submit(build_engine, Settings(config)).result()
    model.loop.runner = MeteredRunner(model.loop.runner, pace)
    return model


if __name__ == "__main__":
    main()
