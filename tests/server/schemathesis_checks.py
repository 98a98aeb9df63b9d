"""Schemathesis hooks (SCHEMATHESIS_HOOKS): the permitted rejections of bodies that are valid for the schema.

JSON Schema cannot express that a prompt must fit into the context, or that a field needs another one. Such
rejections have their own codes; any other 400 for a valid body is a failure.
"""

import schemathesis

# invalid_value is right only where one field contradicts another or the server's size, never for one alone.
RIGHT = {
    "context_length_exceeded",
    "exceeds_kv_capacity",
    "unsupported_parameter",
    "missing_required_parameter",
}
CROSS_FIELD = {
    "stream_options", "top_logprobs", "max_tokens", "min_tokens", "best_of", "prompt", "messages", "n",
    "tokens",
    "structured_outputs", "continue_final_message", "chat_template_kwargs", "logit_bias", "stop_token_ids",
    "input", "text", "tools", "tool_choice", "prompt_logprobs", "queries",
}  # fmt: skip
POOLING = {
    "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/pooling", "/classify",
}  # fmt: skip


@schemathesis.check
def refusals_of_valid_bodies_are_right(ctx, response, case) -> None:
    if response.status_code != 400 or case.meta is None or not case.meta.generation.mode.is_positive:
        return
    if case.path.startswith("/v1/messages"):  # Anthropic's errors have no code
        return
    error = response.json()["error"]
    if error["code"] in RIGHT or (error["code"] == "invalid_value" and error["param"] in CROSS_FIELD):
        return
    # The engine of this test generates text.
    if error["code"] == "unsupported_endpoint" and case.path in POOLING:
        return
    # The arguments of a call are JSON in a string, which a schema of the body cannot say.
    if error["code"] == "invalid_value" and str(error["param"]).endswith(".tool_calls"):
        return
    # An OpenAPI document has its bounds as doubles: beyond 2**53 a whole range of integers is "equal" to one.
    if error["param"] == "seed" and "9223372036854775808" in error["message"]:
        return
    # To JSON Schema 7.0 is an integer, to a strict API it is not: nothing that counts tokens sends it.
    if error["code"] == "invalid_type" and error["message"].endswith(".0") and "integer" in error["message"]:
        return
    raise AssertionError(f"a valid body was refused: {error}")
