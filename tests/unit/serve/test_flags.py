"""What flags mean, which go together, and where each one holds."""

from __future__ import annotations

import contextlib

import pytest

from control_plane.deploy.schema import ALL_STAGE_KEYS
from omnicore.errors import InvalidRequestError
from omniplane.serve import specs
from omniplane.serve.app import main, parse
from omniplane.serve.config import ENGINE_FLAGS, Mode, ServeConfig

FILE = ("--deploy-config", "deploy.yaml")
MASTER = ("--omni-master-address", "127.0.0.1", "--omni-master-port", "9000")
PLAIN = FILE
HEAD = (*FILE, *MASTER, "--stage-id", "0")
HEADLESS = (*MASTER, "--stage-id", "0", "--headless")


def _config(*argv: str) -> ServeConfig:
    return parse(argv)[0]


@pytest.mark.parametrize(
    ("flags", "mode"),
    [(PLAIN, Mode.PLAIN), (HEAD, Mode.HEAD), (HEADLESS, Mode.HEADLESS), ((*HEADLESS, *FILE), Mode.HEADLESS)],
)
def test_stage_id_and_headless_decide_what_it_is(flags: tuple[str, ...], mode: Mode) -> None:
    assert _config("some/model", "--omni", *flags).mode is mode


def test_defaults_are_those_of_the_older_command_line() -> None:
    config = _config("some/model", *PLAIN)
    assert config.model == "some/model"
    assert config.omni_dp_size_local == 1
    assert config.omni_lb_policy == "random"
    assert config.omni_heartbeat_timeout == 30.0
    assert config.omni_replica_address == ""
    assert (config.stage_init_timeout, config.init_timeout) == (300.0, 600.0)
    assert config.port == 8000


def test_short_names() -> None:
    config = _config(*FILE, "-oma", "10.0.0.5", "-omp", "9000", "--stage-id", "1", "--headless", "-ora", "10.0.0.6")
    assert (config.omni_master_address, config.omni_master_port) == ("10.0.0.5", 9000)
    assert config.omni_replica_address == "10.0.0.6"
    assert _config(*FILE, "-tp", "2").tensor_parallel_size == 2


# The four flags that came with replicas, in each of the three modes: accepted, or refused naming the flag.
@pytest.mark.parametrize(
    ("flag", "value", "plain", "head", "headless"),
    [
        ("--omni-dp-size-local", "1", True, True, True),
        ("--omni-dp-size-local", "2", False, True, True),
        ("--omni-lb-policy", "round-robin", True, True, True),
        ("--omni-heartbeat-timeout", "2.5", True, True, True),
        ("--omni-replica-address", "127.0.0.1", False, False, True),
    ],
)
def test_which_flag_holds_where(
    flag: str, value: str, plain: bool, head: bool, headless: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, accepted in ((PLAIN, plain), (HEAD, head), (HEADLESS, headless)):
        with contextlib.nullcontext() if accepted else pytest.raises(InvalidRequestError, match=f"^{flag}: "):
            _config(*flags, flag, value)
        if not accepted:
            assert main([*flags, flag, value]) == 2
            assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--omni-dp-size-local", "0"), "--omni-dp-size-local: must be a whole number from 1 to 4096, got"),
        (("--omni-dp-size-local", "-1"), "--omni-dp-size-local: must be a whole number from 1 to 4096, got"),
        (("--omni-dp-size-local", "x"), "--omni-dp-size-local: must be a whole number"),
        (("--omni-lb-policy", "best"), "least-queue-length, prefix-affinity, topology-aware, got 'best'"),
        (("--omni-heartbeat-timeout", "0"), "--omni-heartbeat-timeout"),
        (("--omni-heartbeat-timeout", "-1"), "--omni-heartbeat-timeout"),
        (("--omni-heartbeat-timeout", "nan"), "--omni-heartbeat-timeout"),
        (("--omni-heartbeat-timeout", "inf"), "--omni-heartbeat-timeout"),
        (("--omni-master-port", "65536"), "--omni-master-port"),
        (("--port", "http"), "--port"),
        (("--omni-dp-size-local", "1000000"), "--omni-dp-size-local: must be a whole number from 1 to 4096"),
        (("--stage-id", "-1"), "--stage-id: must be a stage id from 0 to 65535, got -1"),
        (("--stage-id", "70000"), "--stage-id: must be a stage id from 0 to 65535, got 70000"),
        (("--stage-id", "1.5"), "--stage-id: must be a whole number"),
        (("--stage-init-timeout", "-5s"), "--stage-init-timeout: must be a number, got '-5s'"),
        (("--stage-init-timeout", "1e300"), "--stage-init-timeout: must be a number of seconds above 0 and at most"),
        (("--init-timeout", "0"), "--init-timeout: must be a number of seconds above 0"),
        (("--startup-timeout", "inf"), "--startup-timeout: must be a number of seconds above 0"),
        (("--drain-timeout", "-1"), "--drain-timeout: must be a number of seconds from 0 to"),
        (("--drain-timeout", "nan"), "--drain-timeout: must be a number of seconds from 0 to"),
        (("--grpc-port", "70000"), "--grpc-port: must be a port, 0 to 65535"),
        (("--tensor-parallel-size", "5000"), "--tensor-parallel-size: must be a whole number from 1 to 4096"),
        (("--max-num-seqs", "3000000000"), "--max-num-seqs: must be a whole number from 1 to 2147483647"),
        (("--max-model-len", "0"), "--max-model-len: must be a whole number from 1 to 2147483647"),
        (("--replica-id", "9" * 30), "--replica-id: must be a whole number of at most"),
        (("--deploy-config",), "--deploy-config: needs a value"),
        (("--gpu-memory-utilization", "1.7"), "--gpu-memory-utilization"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
@pytest.mark.parametrize("mode", [PLAIN, HEAD, HEADLESS])
def test_wrong_values_name_the_flag(
    mode: tuple[str, ...], flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*mode, *flags])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert line.endswith("; see 'omniplane serve --help'")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--deploy-config: required"),
        (("--headless",), "--headless: needs --stage-id"),
        ((*FILE, "--stage-id", "0"), "--omni-master-address: required"),
        ((*FILE, "--stage-id", "0", "-oma", "h"), "--omni-master-port: required"),
        ((*MASTER, "--stage-id", "0"), "--deploy-config: required"),
        ((*HEADLESS, "-omp", "0"), "--omni-master-port"),
        ((*HEADLESS, "-oma", "0.0.0.0"), "--omni-master-address"),
        ((*HEADLESS, "-ora", "0.0.0.0"), "--omni-replica-address"),
        ((*FILE, "--stage-configs-path", "other.yaml"), "--stage-configs-path"),
        ((*FILE, "--ssl-certfile", "cert.pem"), "--ssl-keyfile: required"),
    ],
)
def test_what_must_go_together(flags: tuple[str, ...], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        parse(flags)


@pytest.mark.parametrize(("given", "taken"), [("0.5", 2), ("2", 2), ("2.5", 3), ("30", 30)])
def test_leases_are_whole_seconds(given: str, taken: int) -> None:
    assert _config(*PLAIN, "--omni-heartbeat-timeout", given).lease_ttl_s == taken


def test_the_deprecated_replica_id_is_one_warning_with_its_value() -> None:
    notes = list(_config(*HEADLESS, "--replica-id", "7").notes())
    assert [warn for warn, text in notes if "--replica-id" in text] == [True]
    assert [text for _, text in notes if "7" in text] == [
        "--replica-id 7 is deprecated and ignored: the control plane assigns ids"
    ]


def test_the_older_name_of_the_deploy_file_is_taken_with_a_warning() -> None:
    config = _config("--stage-configs-path", "old.yaml")
    assert config.deploy_file == "old.yaml"
    assert list(config.notes()) == [(True, "--stage-configs-path is deprecated: use --deploy-config")]


def test_flags_without_effect_are_never_silent() -> None:
    def told(*flags: str) -> str:
        return "\n".join(text for _, text in _config(*flags).notes())

    assert "/metrics" in told(*PLAIN, "--log-stats")
    assert "no effect without --stage-id" in told(*PLAIN, *MASTER)
    ignored = told(*HEADLESS, *FILE, "--omni-lb-policy", "round-robin", "--omni-heartbeat-timeout", "1")
    assert "--omni-lb-policy, --omni-heartbeat-timeout, --deploy-config" in ignored
    assert told(*HEADLESS) == told(*HEAD) == told(*PLAIN) == ""


def test_engine_flags_are_keys_of_the_schema() -> None:
    assert set(ENGINE_FLAGS) <= set(ALL_STAGE_KEYS)


def test_help_has_the_older_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in (
        *("--omni", "--headless", "--stage-id", "--omni-dp-size-local", "--omni-lb-policy"),
        *("--omni-heartbeat-timeout", "--omni-replica-address", "-ora", "--replica-id"),
        *("--omni-master-address", "-oma", "--omni-master-port", "-omp", "--deploy-config", "--stage-configs-path"),
        *("--stage-init-timeout", "--init-timeout", "--quantization", "--trust-remote-code", "--host", "--port"),
        *("--tensor-parallel-size", "--log-stats"),
    ):
        assert flag in text


@pytest.mark.parametrize(("host", "listens"), [("127.0.0.2", "127.0.0.2:8123"), ("::1", "[::1]:8123")])
def test_host_and_port_are_where_the_gateway_listens(host: str, listens: str) -> None:
    arguments = specs.gateway(_config(*PLAIN, "--host", host, "--port", "8123"), "127.0.0.1:9000").arguments
    assert arguments[arguments.index("--http") + 1] == listens


def test_a_gateway_of_several_processes_that_asks_for_keys() -> None:
    flags = ("--gateway-workers", "3", "--api-keys", "keys.jsonl")
    arguments = specs.gateway(_config(*PLAIN, *flags), "127.0.0.1:7700").arguments
    assert arguments[arguments.index("--workers") + 1] == "3"
    assert arguments[arguments.index("--api-keys") + 1] == "keys.jsonl"
    assert "--api-keys" not in specs.gateway(_config(*PLAIN), "127.0.0.1:7700").arguments
    told = "".join(text for _, text in _config(*HEADLESS, *flags).notes())
    assert "--gateway-workers" in told
    assert "--api-keys" in told


def test_traces_are_the_same_in_all_its_services() -> None:
    flags = (*PLAIN, "--trace-endpoint", "http://127.0.0.1:4317", "--trace-sample", "0.5")
    config = _config(*flags)
    gateway = specs.gateway(config, "127.0.0.1:9000").arguments
    worker = specs.worker(config, "w", pipeline="p", stage_id=0, control_plane_address="127.0.0.1:9000").arguments
    for arguments in (gateway, worker):
        assert arguments[arguments.index("--trace-endpoint") + 1] == "http://127.0.0.1:4317"
    assert gateway[gateway.index("--trace-sample") + 1] == "0.5"
    assert "--trace-sample" not in worker
    assert "--trace-endpoint" not in specs.gateway(_config(*PLAIN), "127.0.0.1:9000").arguments
