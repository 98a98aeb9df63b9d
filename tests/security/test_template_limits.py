"""Chat templates that would compute without end or fill the memory are refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tonnage.planner.errors import ConfigError
from tonnage.server.text.chat_template import ChatTemplate, TemplateRefused

HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 30000000 }}",
        "{{ 2000000000 * 'x' }}",
        "{{ [1] * 30000000 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
        "{{ '%2000000000d' % 3 }}",
        "{{ '%*d' % (2000000000, 3) }}",
        "{{ '{:>2000000000}'.format(3) }}",
        "{{ '{:{w}}'.format(3, w=2000000000) }}",
        "{{ 'a'.ljust(2000000000) }}",
        "{{ '\t'.expandtabs(2000000000) }}",
        "{{ ('x' * 1000000).replace('x', 'y' * 1000) }}",
        "{{ ('y' * 1000).join(['x'] * 1000000) }}",
        "{{ 'a' | center(2000000000) }}",
        "{{ 'a\nb' | indent(2000000000) }}",
        "{{ '%2000000000d' | format(3) }}",
    ],
)
def test_template_that_produces_unlimited_text_is_stopped_with_an_error(source: str) -> None:
    tracemalloc.start()
    try:
        template = ChatTemplate(source)  # nothing is computed while it is compiled
        assert tracemalloc.get_traced_memory()[1] < 2**21
        with pytest.raises(TemplateRefused, match=r"too large|more than"):
            template.render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 3 * 4 }}{{ 2 ** 10 }}{{ [1] + [2] }}", "ababab121024[1, 2]"),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role ~ ':' ~ m['content'] }}"
         "{% else %}none{% endfor %}", "1/1 user:hi"),
        ("{% for m in messages[1:] %}{{ m }}{% else %}none{% endfor %}", "none"),
        ("{{ '%s-%05d' % ('a', 3) }}{{ '{:>3}'.format(3) }} {{ '%d' % 1700000000 }}", "a-00003  3 1700000000"),
        ("{{ messages | map(attribute='role') | join(', ') }} {{ 'a' | center(3) }}|{{ 'a\nb' | indent(2) }}",
         "user  a |a\n  b"),
        ("{{ 'a-b'.replace('-', '+').ljust(5) }}|{{ ', '.join(['x', 'y']) }}", "a+b  |x, y"),
    ],
)  # fmt: skip
def test_template_within_the_limits_renders_as_in_plain_jinja(source: str, text: str) -> None:
    assert ChatTemplate(source).render(HELLO) == text


def test_limit_of_template_loop_iterations_counts_per_rendering() -> None:
    template = ChatTemplate("{% for i in range(1000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}done")
    assert [template.render(HELLO) for _ in range(3)] == ["done"] * 3


def test_too_deeply_nested_chat_template_is_rejected_at_the_start(tmp_path: Path) -> None:
    for source in ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 2000 + "{% endif %}" * 2000):
        path = tmp_path / "chat.jinja"
        path.write_text(source)
        with pytest.raises(ConfigError, match="chat_template"):
            ChatTemplate.from_folder(tmp_path, path)


def test_memory_error_while_rendering_a_template_is_a_client_error(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ messages }}")

    def full(**more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(template._template, "generate", full)
    with pytest.raises(TemplateRefused):
        template.render(HELLO)
