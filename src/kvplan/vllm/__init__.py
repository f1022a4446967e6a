"""The connector for vLLM: the only room that imports vLLM. It translates, and decides nothing.

Start vLLM with ``--kv-transfer-config '{"kv_connector": "KVPlanConnector", "kv_role": "kv_both"}'``. Importing this
package imports neither vLLM nor torch; ``kvplan.vllm.connector`` does.
"""

__all__: list[str] = []
