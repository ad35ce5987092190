"""Steps in which prompts join decodes are of a bounded length, unless many prompts wait."""

from __future__ import annotations

from tests.scheduler.rig import Rig, entries, make_request


def test_a_prompt_is_read_whole_where_nobody_decodes() -> None:
    rig = Rig(num_blocks=200, budget=64, max_num_mixed_tokens=8)
    rig.add(make_request("a", 40), make_request("b", 20))
    assert {n: e.num_tokens for n, e in entries(rig.step()).items()} == {"a": 40, "b": 20}


def test_beside_decodes_it_is_read_in_chunks() -> None:
    rig = Rig(num_blocks=200, budget=64, max_num_mixed_tokens=8)
    rig.add(make_request("a", 4, 20))
    rig.step()
    rig.add(make_request("b", 20), make_request("c", 9))
    sizes = [{n: e.num_tokens for n, e in entries(rig.step()).items()} for _ in range(4)]
    assert sizes == [
        {"a": 1, "b": 7},
        {"a": 1, "b": 7},
        {"a": 1, "b": 6, "c": 1},
        {"a": 1, "b": 1, "c": 6},
    ]


def test_where_many_wait_chunks_grow_with_their_number() -> None:
    rig = Rig(num_blocks=400, budget=100, seats=40, max_num_mixed_tokens=8)
    rig.add(make_request("a", 4, 20))
    rig.step()
    rig.add(*(make_request(f"p{i}", 30) for i in range(12)))
    numbers = [
        sum(e.num_tokens for e in plan.scheduled if e.num_tokens > 1)
        for plan in rig.run()
        if any(e.num_tokens == 1 and e.samples for e in plan.scheduled)
    ]
    assert numbers[0] == 23  # and one decode: three lines of four prompts
    assert max(numbers) == 23
    assert min(number for number in numbers if number) < 8
    assert not rig.scheduler.num_waiting


def test_prompts_go_on_however_many_decode() -> None:
    rig = Rig(num_blocks=400, budget=100, seats=40, max_num_mixed_tokens=8)
    rig.add(*(make_request(f"d{i}", 2, 20) for i in range(12)))
    rig.step()
    rig.add(make_request("p", 9))
    assert entries(rig.step())["p"].num_tokens == 2
    assert entries(rig.step())["p"].num_tokens == 2


def test_without_the_bound_a_prompt_takes_what_is_left() -> None:
    rig = Rig(num_blocks=200, budget=64)
    rig.add(make_request("a", 4, 20))
    rig.step()
    rig.add(make_request("b", 50))
    assert entries(rig.step())["b"].num_tokens == 50
