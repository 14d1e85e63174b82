"""A load of completions, ten at a time, against any OpenAI-compatible server; prints throughput and latency.

`localllm bench serve --num-requests 100 --concurrency 10` measures the same, and the time to first token too.
"""

import asyncio
import os
import time

import aiohttp

URL = os.environ.get("LOCALLLM_URL", "http://localhost:8000/v1")
NUM_REQUESTS = int(os.environ.get("NUM_REQUESTS", "100"))
CONCURRENCY = 10


async def complete(session: aiohttp.ClientSession, model: str, turn: asyncio.Semaphore) -> tuple[float, int]:
    """Seconds and output tokens of one request."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 50, "temperature": 0}
    async with turn:
        started = time.perf_counter()
        async with session.post(f"{URL}/completions", json=body) as response:
            response.raise_for_status()
            usage = (await response.json())["usage"]
        return time.perf_counter() - started, usage["completion_tokens"]


async def main() -> None:
    turn = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{URL}/models") as response:
            model = (await response.json())["data"][0]["id"]
        started = time.perf_counter()
        done = await asyncio.gather(*(complete(session, model, turn) for _ in range(NUM_REQUESTS)))
        total = time.perf_counter() - started
    latencies, tokens = sorted(seconds for seconds, _ in done), sum(count for _, count in done)
    print(f"total time    {total:.2f} s")
    print(f"requests/s    {NUM_REQUESTS / total:.2f}")
    print(f"tokens/s      {tokens / total:.1f}")
    print(f"mean latency  {sum(latencies) / len(latencies):.3f} s")
    print(f"P50 latency   {latencies[len(latencies) // 2]:.3f} s")
    print(f"P99 latency   {latencies[int(len(latencies) * 0.99)]:.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
