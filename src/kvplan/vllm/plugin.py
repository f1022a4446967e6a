"""What vLLM's ``vllm.general_plugins`` entry point calls: it names the connector, and imports none of its code."""

from __future__ import annotations

NAME = "KVPlanConnector"
"""What users write as ``kv_connector``."""

MODULE = "kvplan.vllm.connector"
"""Where the class lives; vLLM imports it when a configuration names it (or as ``kv_connector_module_path``)."""


def register() -> None:
    """Register the connector with vLLM's factory. Called in every vLLM process, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvplan.vllm.compat import is_registered

    if not is_registered(KVConnectorFactory, NAME):
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
