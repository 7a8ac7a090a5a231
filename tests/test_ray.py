"""The engine on a Ray cluster of several nodes on this machine: nodes that die, and clusters that are not there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_work import Square

from carlreg.cohort.engine import run
from carlreg.cohort.work import WorkerError, Workers
from carlreg.errors import InputError

ray = pytest.importorskip("ray")


SOURCE, TESTS = Path(__file__).parents[1] / "src", Path(__file__).parent


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head without cores, where the driver is, and two nodes with two cores each: three raylets."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), str(TESTS)]))  # for the workers
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    cluster.nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_a_cluster_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where no address is left of a cluster that was killed
    with pytest.raises(WorkerError, match=r"no Ray cluster answers at 'auto' .* `ray start --head`"):
        list(run(Square(tmp_path), range(3), Workers(ray="auto")))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"no Ray cluster answers at '{address}' .* check the address"):
        list(run(Square(tmp_path), range(3), Workers(ray=address)))
    assert time.monotonic() - start < 10


def test_work_is_completed_when_a_node_dies(cluster: Any, tmp_path: Path) -> None:
    work = Square(tmp_path, seconds=0.2, raises_once=3, refuses=5, kills_once=7)
    found, start = {}, time.monotonic()
    for outcome in run(work, range(40), Workers(ray=cluster.address)):
        assert outcome.task not in found
        found[outcome.task] = outcome
        if len(found) == 10:
            assert len(list(tmp_path.glob("open-*"))) >= 3  # workers on both nodes
            cluster.remove_node(cluster.nodes.pop(), allow_graceful=False)
    assert sorted(found) == list(range(40))
    failed = [n for n, one in found.items() if one.failure]
    assert failed == [5]
    assert found[5].failure is not None
    assert found[5].failure.message == "the file does not exist"
    assert found[3].tries == found[7].tries == 2
    assert all(found[n].result[0] == n * n for n in range(40) if n != 5)
    assert {found[n].result[2] for n in range(40) if n != 5} == {"1"}, "threads of a worker with one core"
    assert time.monotonic() - start < 120
    with pytest.raises(InputError, match="no model 'x'"):
        list(run(Square(tmp_path, cannot_open=True), range(3), Workers(ray=cluster.address, count=2)))
