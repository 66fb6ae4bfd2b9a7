from nextstate.judge.breaker import Breaker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def a_breaker(**settings):
    clock = Clock()
    return Breaker(failures_to_open=3, first_wait_s=5.0, longest_wait_s=15.0, clock=clock, **settings), clock


def test_three_failures_in_a_row_open_it_and_a_success_between_them_starts_the_count_again():
    breaker, _ = a_breaker()
    assert [breaker.failed(), breaker.failed(), breaker.succeeded()] == [None, None, False]
    assert [breaker.failed(), breaker.failed()] == [None, None]
    assert (breaker.open, breaker.may_try(4)) == (False, 4)
    assert breaker.failed() == 5.0
    assert (breaker.open, breaker.may_try(4)) == (True, 0)


def test_after_the_wait_one_turn_is_tried_and_each_failed_trial_doubles_the_wait_up_to_its_bound():
    breaker, clock = a_breaker()
    waits = [breaker.failed() for _ in range(3)]
    for expected in (10.0, 15.0, 15.0):  # 5, then twice as long, then the bound instead of 20
        clock.now_s += waits[-1]
        assert breaker.may_try(4) == 1
        waits.append(breaker.failed())
        assert waits[-1] == expected
        assert breaker.may_try(4) == 0
        assert breaker.wait_s == expected


def test_turns_that_were_under_way_when_it_opened_do_not_lengthen_the_wait():
    breaker, _ = a_breaker()
    assert [breaker.failed() for _ in range(6)] == [None, None, 5.0, None, None, None]
    assert breaker.wait_s == 5.0


def test_a_trial_that_succeeds_closes_it_and_the_next_outage_begins_with_the_first_wait():
    breaker, clock = a_breaker()
    for _ in range(3):
        breaker.failed()
    clock.now_s += 5.0
    assert breaker.succeeded() is True
    assert (breaker.open, breaker.may_try(4), breaker.wait_s) == (False, 4, 0.0)
    assert [breaker.failed() for _ in range(3)] == [None, None, 5.0]
