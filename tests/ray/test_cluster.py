# SPDX-License-Identifier: Apache-2.0
"""Connecting to a cluster, and what is said where that is not possible.

A process has one connection, and this one's is the tests' own: others are made in other processes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest

from penstock import Ray
from penstock.engine.backends.ray.cluster import connect, what_is_free
from penstock.errors import ConfigError

PREAMBLE = """
    import logging, os, sys, time
    logging.disable(logging.CRITICAL)
    from penstock.engine.backends.ray.cluster import connect
    from penstock.options import Ray
    from penstock.errors import ConfigError
"""


def said_by(code, *arguments, **variables):
    """Run in another process, which is not connected; return what it prints."""
    env = {**os.environ, **variables}
    code = textwrap.dedent(PREAMBLE) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


REFUSED = """
    begun = time.monotonic()
    try:
        connect(Ray(sys.argv[1]))
    except ConfigError as error:
        print(error)
        print(time.monotonic() - begun < 30)
"""


def test_the_connection_there_is_is_used(cluster):
    on_localhost = "localhost:" + cluster.address.rpartition(":")[2]
    for address in (None, "auto", "local", cluster.address, on_localhost):
        assert connect(Ray(address)) is cluster.ray


@pytest.mark.parametrize("other", ["192.0.2.77:6379", "localhost:1", "nonsense"])
def test_another_cluster_than_the_one_connected_to_is_refused(cluster, other):
    with pytest.raises(ConfigError, match=f"cluster at {cluster.address}, got address='{other}'"):
        connect(Ray(other))


def test_ray_client_is_refused_with_what_to_do_instead(cluster):
    with pytest.raises(ConfigError, match="Run the main process on a node of the cluster"):
        connect(Ray("ray://10.0.0.1:10001"))
    noted = said_by(REFUSED, "ray://10.0.0.1:10001")
    assert "Run the main process on a node of the cluster" in noted
    by_environment = said_by(REFUSED, "auto", RAY_ADDRESS="ray://10.0.0.1:10001")
    assert "Run the main process on a node of the cluster" in by_environment


def test_the_address_may_come_from_the_environment(cluster):
    code = "print(connect(Ray()).get_runtime_context().gcs_address)"
    assert said_by(code, RAY_ADDRESS=cluster.address) == f"{cluster.address}\n"


def test_other_versions_are_told(cluster):
    ray = cluster.ray
    noted = said_by(
        "import ray; ray.__version__ = '0.0.1'" + textwrap.dedent(REFUSED), cluster.address
    )
    python = ".".join(map(str, sys.version_info[:3]))
    assert noted.startswith(f"Ray cannot be used, address={cluster.address!r}: ")
    assert f"The cluster was started with: Ray: {ray.__version__} Python: {python}" in noted
    assert f"was started with: Ray: 0.0.1 Python: {python}" in noted


def test_a_forked_child_is_told_that_the_connection_is_its_parents(cluster):
    # In a process of its own: a child of a process that has used much of Ray may end in gRPC's
    # handlers of a fork, before it runs a line of Python.
    code = """
        import os
        connect(Ray(sys.argv[1]))
        if not (child := os.fork()):
            try:
                connect(Ray())
            except ConfigError as error:
                print(os.getpid(), error, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """
    child, _, noted = said_by(code, cluster.address).partition(" ")
    assert noted.startswith(f"this process ({child}) was forked from one that was connected")


def test_what_the_user_does_on_sigterm_stays(cluster):
    code = """
        import signal
        mine = lambda *_: None
        signal.signal(signal.SIGTERM, mine)
        connect(Ray(sys.argv[1]))
        print(signal.getsignal(signal.SIGTERM) is mine)
    """
    assert said_by(code, cluster.address) == "True\n"


def test_what_is_free_tells_amounts_and_no_secrets(cluster):
    given = {
        "num_cpus": 3,
        "resources": {"far": 1000},
        "runtime_env": {"env_vars": {"TOKEN": "hunter2"}},
        "scheduling_strategy": "SPREAD",
    }
    noted = what_is_free(cluster.ray, Ray(**given))
    amounts = "4 CPU, 100 far, # memory, 100 near, # object_store_memory"
    assert re.sub(r"\S+ (\w*memory)", r"# \1", noted) == (
        "each asks for {'num_cpus': 3, 'resources': {'far': 1000}, 'scheduling_strategy': 'SPREAD'}"
        f"; the cluster has {amounts}; free are {amounts}."
    )
