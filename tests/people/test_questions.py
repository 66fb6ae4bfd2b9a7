from nextstate.people.questions import held_out_questions, training_questions


def test_there_are_enough_questions_to_learn_from_and_to_measure_with():
    assert len({question.text for question in training_questions()}) >= 160
    assert len({question.text for question in held_out_questions()}) >= 48


def test_no_question_is_there_twice():
    texts = [question.text.lower() for question in (*training_questions(), *held_out_questions())]
    assert len(set(texts)) == len(texts)


def test_held_out_questions_share_no_topic_and_no_subject_with_training():
    training, held_out = training_questions(), held_out_questions()
    assert not {question.topic for question in training} & {question.topic for question in held_out}
    assert not {question.subject for question in training} & {question.subject for question in held_out}


def test_a_question_is_its_form_with_the_subject_in_the_gap():
    coal = next(question for question in training_questions() if question.subject == "coal")
    assert (coal.text, coal.topic) == ("What color is coal?", "colors")


def test_no_question_says_how_it_should_be_answered():
    ways = {"short", "brief", "briefly", "sentence", "sentences", "please", "concise", "line", "list"}
    for question in (*training_questions(), *held_out_questions()):
        assert question.text.endswith("?")
        assert not ways & set(question.text.lower().rstrip("?").split())
