"""What the server refuses is said where it was typed."""

from __future__ import annotations

from tests.web_page.studio import until


def refused(tab, label, **fields):
    tab.fill(**fields)
    tab.button("Generate").click()
    return until(lambda: tab.problem_at(label))


def test_a_refused_field_says_so_itself(demo, open_tab):
    tab = open_tab(demo)
    assert "nearest valid value: 32" in refused(tab, "Width", width=33)
    assert tab.page.evaluate("document.activeElement.labels[0].textContent") == "Width"
    assert tab.problem_at("Steps") == ""


def test_several_fields_at_once_and_the_focus_on_the_first(demo, open_tab):
    tab = open_tab(demo)
    assert "is empty" in refused(tab, "Prompt", prompt=" ", steps=100_000)
    assert "outside 1..200" in tab.problem_at("Steps")
    assert tab.page.evaluate("document.activeElement.labels[0].textContent") == "Prompt"


def test_what_is_no_number_is_said_before_it_is_sent(demo, open_tab):
    tab = open_tab(demo)
    assert "is not a whole number from 0" in refused(tab, "Seed", seed="seven")
    assert "is not a whole number" in refused(tab, "Steps", seed="7", steps="2.5")


def test_a_mended_form_is_sent(demo, open_tab):
    tab = open_tab(demo)
    refused(tab, "Width", width=33, steps=2)
    job = tab.generate(width=32)
    assert tab.problem_at("Width") == ""
    tab.wait(job)


def test_values_of_another_model_are_left_out(demo, open_tab):
    tab = open_tab(demo)
    tab.fill()
    # the draft of an earlier visit, with fields that this model has not
    tab.page.evaluate(
        """() => {
            const draft = JSON.parse(localStorage.getItem("omni_grpc.draft"));
            const other = { model: "other", task: 6, frames: "7", cache: "tea_cache", scheduler: "None" };
            localStorage.setItem("omni_grpc.draft", JSON.stringify({ ...draft, ...other }));
        }"""
    )
    tab.page.reload()
    tab.wait(tab.generate(steps=2))
