"""Stores that Spark's processes cannot reach are refused before any of them tries."""

import pytest

from omniq.errors import ConfigError
from omniq.spark.address import must_reach
from omniq.spark.settings import is_local_master


@pytest.mark.parametrize("url", ["sqlite:///q.db", "sqlite:////srv/q.db", "file:///srv/q"])
def test_a_store_of_one_machine_is_refused_on_a_cluster_of_several(url: str) -> None:
    for master in ("spark://10.0.0.7:7077", "spark://127.0.0.1:7077,10.0.0.7:7077", "yarn", "k8s://https://cluster"):
        with pytest.raises(ConfigError, match="keep the tasks in Redis"):
            must_reach(url, is_local_master(master))
        must_reach("redis://10.0.0.7:6379/0", is_local_master(master))
    for master in ("local[*]", "local", "spark://127.0.0.1:7077", "spark://localhost:7077"):
        must_reach(url, is_local_master(master))


@pytest.mark.parametrize("url", ["memory://", "sqlite://"])
def test_a_store_inside_one_process_is_refused_everywhere(url: str) -> None:
    with pytest.raises(ConfigError, match="lives inside one process"):
        must_reach(url, local=True)
