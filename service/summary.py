"""The preset behind /summary: what the model is asked, by length, focus and language."""

from service.schemas import ChatRequest, SummaryRequest

_LENGTHS = {
    "short": ("in two or three sentences", 160),
    "medium": ("in one or two paragraphs", 400),
    "long": ("in detail, section by section", 1200),
}
_TOKENS_PER_QUOTE = 80
# Long greedy text of small models repeats itself without.
_REPETITION_PENALTY = 1.1


def summary_prompt(request: SummaryRequest) -> str:
    """The question that asks for a summary."""
    how, _ = _LENGTHS[request.length]
    sentences = [f"Summarize the document {how}."]
    if request.focus:
        sentences.append(f"Focus on {request.focus}.")
    sentences.append("Use only what the document says.")
    if request.quotes:
        asked = "one passage" if request.quotes == 1 else f"up to {request.quotes} passages"
        sentences.append(
            f"Then quote {asked} of the document that the summary rests on, word for word, each on a line of its own "
            "that begins with '> '."
        )
    if request.language:
        sentences.append(f"Write in {request.language}.")
    return " ".join(sentences)


def summary_chat(request: SummaryRequest, *, model: str, file_id: str) -> ChatRequest:
    """The chat that a summary is."""
    content = [{"type": "file", "file": {"file_id": file_id}}, {"type": "text", "text": summary_prompt(request)}]
    return ChatRequest.model_validate(
        {
            "model": model,
            "messages": [{"role": "user", "content": content}],
            "stream": request.stream,
            "stream_options": request.stream_options,
            "temperature": request.temperature,
            "repetition_penalty": _REPETITION_PENALTY,
            "seed": request.seed,
            "max_tokens": request.max_tokens or _LENGTHS[request.length][1] + _TOKENS_PER_QUOTE * request.quotes,
        }
    )
