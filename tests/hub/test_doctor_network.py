"""`localllm doctor --network`: the real client asks a real hub."""

import json

import pytest

from localllm.cli import doctor, main
from tests.hub.local_hub import LocalHub
from tests.web.live_server import wait_until


def test_the_hub_answers_or_the_reason_is_said(
    hub: LocalHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python,))
    assert main(["doctor", "--json"]) == 0
    assert hub.sent == []
    capsys.readouterr()
    assert main(["doctor", "--network", "--json"]) == 0
    [finding] = [each for each in json.loads(capsys.readouterr().out) if each["subject"] == "hub"]
    assert finding["verdict"] == "ok"
    assert hub.url in finding["text"]
    wait_until(lambda: len(hub.sent) == 1)  # noted once the answer has been sent
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["doctor", "--network", "--json"]) == 1
    [finding] = [each for each in json.loads(capsys.readouterr().out) if each["subject"] == "hub"]
    assert finding["verdict"] == "problem"
    assert finding["remedy"]
