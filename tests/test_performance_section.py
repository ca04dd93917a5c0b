"""The pages on performance and the charts are what the committed results make of them; and what a comparison says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.bench.cpu import report
from tests.bench.cpu.chart import draw
from tests.bench.cpu.contenders import InProcess
from tests.bench.cpu.figures import summary, table
from tests.bench.cpu.glance import brief, glance
from tests.bench.cpu.peers import OUR_INT8, contenders_of, find_peers, our_contenders
from tests.bench.cpu.worker import ENGINES
from tests.bench.gpu import report as gpu_report
from tests.bench.workloads import WORKLOADS, num_tokens


def figures(tok_s: float, p99_ms: float) -> dict[str, float]:
    return {"output_tok_s": tok_s, "wall_s": 100 / tok_s, "median_ttft_ms": 90.0, "p99_ttft_ms": 300.0} | {
        "median_itl_ms": 20.0,
        "p99_itl_ms": p99_ms,
    }


@pytest.fixture
def results() -> dict[str, Any]:
    """Two rounds of two servers, of which ours is faster and less even; and the parts of a step."""
    rounds = {
        "millrace server": [figures(200.0, 50.0), figures(300.0, 60.0)],
        "other server": [figures(100.0, 40.0), figures(200.0, 40.0)],
    }
    parts = {"linears": 6.0, "attention": 2.0, "rest": 0.5, "host": 1.5, "step": 10.0, "floor": 7.5}
    labels = list(rounds)
    return {
        "shape": "smollm2-135m",
        "dtype": "bfloat16",
        "rounds": 2,
        "measured_on": "2026-11-22",
        "note": "A quiet machine.",
        "cpu": "A <fast> one",
        "instructions": "AVX512",
        "threads": 2,
        "python": "3.11.7",
        "read_bandwidth_gb_s": {"median": 40.0, "least": 38.0, "greatest": 44.0},
        "versions": {"millrace server": "0.1", "other server": "7.5"},
        "ready_s": {label: 1.5 for label in labels},
        "peak_mib": {label: 1024 for label in labels},
        "tokens": {"w4": {"in": 4753, "out": 2587}},
        "workloads": {"w4": summary("w4", rounds)},
        "parts": [
            {f"{name}_ms": value for name, value in parts.items()}
            | {"batch": 8, "share_of_floor": 0.75, "read_bandwidth_gb_s": 40.0}
        ],
    }


def test_the_page_on_cpus_tells_what_the_committed_results_say():
    page = report.PAGE.read_text()
    assert report.replaced(page, report.section()) == page, "run python -m tests.bench.cpu.report"


def test_readme_has_one_table_of_the_committed_results_with_at_most_ten_rows():
    readme, made = report.README.read_text(), report.table_of_readme()
    assert report.replaced(readme, made) == readme, "run python -m tests.bench.cpu.report"
    assert made.count("\n|") <= 2 + 10


def test_the_page_on_gpus_tells_what_was_measured(tmp_path: Path):
    page = gpu_report.PAGE.read_text()
    assert gpu_report.replaced(page, gpu_report.section()) == page, "run python -m tests.bench.gpu.report"
    result = next(iter(gpu_report.RESULTS.glob(gpu_report.FILES)))
    found = json.loads(result.read_text())
    found["parts"]["gates"] |= {"wrong": ["an answer differs"], "failed": "stopped after 80 s"}
    found["parts"]["sanitizer"] |= {"wrong": [], "rows": [{"skipped": "compute-sanitizer is not installed"}]}
    found["parts"]["kernels"]["failed"] = "its process ended with status -9"
    found["parts"]["steps-0.6b"]["rows"][0]["step_us"] = 123_456.0
    (tmp_path / "gpu-x.json").write_text(json.dumps(found))
    made = gpu_report.section(tmp_path)
    for told in ("s: 1 complaint; stopped after 80 s\n", "skipped, compute-sanitizer", "status -9", "| 123.46 ms |"):
        assert told in made
    assert found["versions"]["triton"] in made


def test_each_chart_is_drawn_from_its_results():
    charts = {path.name: path.read_text() for path in report.RESULTS.glob("cpu-*.svg")}
    drawn = {report.chart_of(path).name: draw(json.loads(path.read_text())) for path in report.found()}
    assert charts == drawn, "run python -m tests.bench.cpu.report"


def test_ratios_are_those_of_each_round_and_where_less_is_better_the_other_way_round(results: dict[str, Any]):
    ratios = results["workloads"]["w4"]["ours_to_theirs"]["other server"]
    assert ratios["output_tok_s"] == {"median": 1.75, "least": 1.5, "greatest": 2.0}
    assert ratios["p99_itl_ms"]["greatest"] == 0.8 and ratios["wall_s"]["median"] == pytest.approx(1.75)
    assert "ours: 1.75 (1.50..2.00)" in table(results)


def test_the_section_names_versions_machine_ratios_and_losses(results: dict[str, Any], tmp_path: Path):
    (tmp_path / "cpu-shape-machine.json").write_text(json.dumps(results))
    made = report.section(tmp_path)
    folded = "<details><summary>smollm2-135m, bfloat16, A &lt;fast&gt; one (AVX512)</summary>\n\n2 threads, 2026-11-22"
    told = "other 7.5. W2 and W4 are of 4,753 tokens in and 2,587 out.\n"
    for words in (folded, told, "38.0 to 44.0", "A quiet machine."):
        assert words in made
    assert "| other | 150 (millrace 1.75x) | 90 / 300 | 20 / 40 | 1.5 | 1,024 |" in made
    assert "| 8 | 10.00 | 6.00 | 2.00 | 0.50 | 1.50 | 7.50 | 75% |" in made
    losses = [line for line in made.splitlines() if line.startswith("- W4")]
    lost = "- W4, gap between tokens, p99: other server is 1.36 times as good"
    assert losses == [f"{lost}, in 1 of its 1 runs", lost]


def test_int8_weights_are_compared_in_process_alone_and_said_to_be_such(results: dict[str, Any], tmp_path: Path):
    w1 = {"millrace int8": [{"decode_tok_s": 150.0}], "third": [{"decode_tok_s": 100.0}]}
    found = summary("w1", w1 | {"third server": [{"decode_tok_s": 90.0}]})
    assert found["ours_to_theirs"] == {}
    assert [(label, each["decode_tok_s"]["median"]) for label, each in found["int8_to_theirs"].items()] == [
        ("third", 1.5)
    ]
    versions = {"millrace": "0.1", OUR_INT8: "0.1", "third": "3"}
    figures = {name: dict.fromkeys(versions, 1) for name in ("ready_s", "peak_mib")}
    results |= {"versions": versions, "workloads": {"w1": found}, "tokens": {}, **figures}
    (tmp_path / "cpu-shape-machine.json").write_text(json.dumps(results))
    made = report.section(tmp_path)
    told = "3.11.7, millrace 0.1, third 3. millrace int8 has weights in int8, all others in bfloat16.\n"
    assert told in made
    assert "Where millrace loses: in no figure of these workloads, against third." in made


def test_each_engine_that_is_compared_in_process_is_one_that_the_worker_has():
    ours = our_contenders("model", 2, "0.1")
    assert {each.label for each in ours} == {"millrace", OUR_INT8, "millrace server"}
    assert all(each.engine in ENGINES for each in ours if isinstance(each, InProcess))


def test_w2_and_w4_have_the_same_lengths_in_each_run_and_other_ids():
    asked = [WORKLOADS[name](run) for name in ("w2", "w4") for run in (0, 1)]
    lengths = [[(len(ids), num_answer) for ids, num_answer in each] for each in asked]
    assert all(each == lengths[0] for each in lengths)
    assert num_tokens(asked[0]) == {"in": 4753, "out": 2587}
    assert len({tuple(ids) for each in asked for ids, _ in each}) == 4 * 32


def test_a_glance_tells_which_runs_were_asked_something_else(results: dict[str, Any]):
    before = results | {"cpu": "Another", "tokens": {"w2": {"in": 3542, "out": 2669}}}
    without = results | {"cpu": "A third", "tokens": {"w1": {"in": 128, "out": 128}}}
    (line,) = [line for line in glance([results, before, without]) if line.startswith("- W2 and W4 had")]
    assert line.startswith(
        "- W2 and W4 had 3,542 tokens in and 2,669 out, now they have 4,753 tokens in and 2,587 out: "
    )
    assert line.endswith(": smollm2-135m, bfloat16, Another (AVX512)")


def test_a_glance_has_the_best_of_the_others_for_each_run_and_the_worst_of_what_is_lost(results: dict[str, Any]):
    w1 = {"millrace": [{"decode_tok_s": 90.0, "share_of_bandwidth": 0.875}], "third": [{"decode_tok_s": 100.0}]}
    w1["millrace int8"] = [{"decode_tok_s": 150.0}]
    w3 = {"millrace server": [{"wall_s": 2.0}], "other server": [{"wall_s": 3.0}], "third server": [{"wall_s": 2.5}]}
    workloads = {"w1": summary("w1", w1), "w3": summary("w3", w3), **results["workloads"]}
    another = results | {"cpu": "Another", "note": None, "workloads": workloads}
    lines = list(glance([results, another]))
    shape = "smollm2-135m, bfloat16"
    row = "- | - | - | - | - | 1.75 other | 1.00 other | 0.73 other | -"
    assert f"| {shape}, A &lt;fast&gt; one (AVX512) | {row} |" in lines
    row = "0.90 third | 1.50 third | - | - | 1.25 third | 1.75 other | 1.00 other | 0.73 other | 0.88"
    assert f"| {shape}, Another (AVX512) | {row} |" in lines
    assert [line for line in lines if line.startswith("- ")] == [
        f"- {shape}, A &lt;fast&gt; one (AVX512): A quiet machine.",
        "- W1, decode rate: third is 1.11 times as good, in 1 of its 1 runs",
        "- W4, gap between tokens, p99: other server is up to 1.36 times as good, in 2 of its 2 runs",
    ]


def test_a_glance_without_peers_says_that_there_was_no_peer(results: dict[str, Any]):
    results["workloads"]["w4"]["ours_to_theirs"] = {}
    assert list(glance([results]))[-1] == "Where millrace loses: there was no peer to compare with."
    assert list(glance([])) == []


def test_the_table_of_readme_has_a_row_for_each_run_and_one_line_of_losses(results: dict[str, Any]):
    lines = list(brief([results, results | {"cpu": "Another"}]))
    row = "2026-11-22 | - | - | - | 1.75 other | 1.00 other | 0.73 other |"
    assert lines[2:4] == [
        f"| smollm2-135m, bfloat16, {cpu} (AVX512) | {row}" for cpu in ("A &lt;fast&gt; one", "Another")
    ]
    assert lines[-1] == "Where millrace loses, at worst: gap between tokens, p99: 16 streams 1.36x against other."
    results["workloads"]["w4"]["ours_to_theirs"] = {}
    assert list(brief([results]))[-1] == "Where millrace loses: in no figure of these runs."


def test_where_nothing_is_lost_the_section_says_to_whom(results: dict[str, Any], tmp_path: Path):
    results["workloads"]["w4"]["ours_to_theirs"]["other server"] = {"output_tok_s": {"median": 1.1}}
    (tmp_path / "cpu-shape-machine.json").write_text(json.dumps(results))
    made = report.section(tmp_path)
    assert "Where millrace loses: nowhere in these runs." in made
    assert "Where millrace loses: in no figure of these workloads, against other server." in made


def test_a_section_takes_the_place_of_the_one_before():
    page = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    made = f"{report.BEGIN}\nnew\n{report.END}"
    assert report.replaced(page, made) == f"before\n{made}\nafter\n"


def test_a_chart_is_small_well_formed_and_has_a_bar_for_each_engine_and_part(results: dict[str, Any]):
    chart = draw(results)
    shapes = [each.tag.rpartition("}")[2] for each in ElementTree.fromstring(chart).iter()]
    assert shapes.count("rect") == 1 + 2 + 4 + 4  # background, engines, a step's parts, their legend
    assert len(chart) < 8192 and "A &lt;fast&gt; one" in chart


def test_peers_are_found_by_flag_variable_or_folder_and_the_others_are_left_out_with_a_line(tmp_path: Path):
    for name in ("vllm", "llama-server"):
        program = tmp_path / name / "bin" / "python"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho 1.2.3\n")
        program.chmod(0o755)
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    server = tmp_path / "llama-server" / "bin" / "python"
    peers, missing = find_peers([f"llama-server={server},{gguf}"], {"MILLRACE_PEERS": str(tmp_path)})
    assert [peer.name for peer in peers] == ["transformers", "vllm", "llama-server"]
    assert [line.partition(" is left out")[0] for line in missing] == ["openvino-genai", "llama-cpp-python"]
    assert "there is no program" in missing[0]
    by_variable, _ = find_peers([], {"MILLRACE_PEER_VLLM": str(server)})
    assert [peer.program for peer in by_variable if peer.name == "vllm"] == [str(server)]
    labels = [(each.label, each.version) for peer in peers[1:] for each in contenders_of(peer, "model", 2)]
    assert labels == [("vLLM", "1.2.3"), ("vLLM server", "1.2.3"), ("llama.cpp server", "1.2.3")]


def test_a_peer_that_reads_a_converted_model_is_left_out_without_one(tmp_path: Path):
    program = tmp_path / "python"
    program.touch(0o755)
    peers, missing = find_peers([f"openvino-genai={program}"], {})
    assert "openvino-genai" not in [peer.name for peer in peers]
    assert any("reads a converted model" in line for line in missing)
    with pytest.raises(SystemExit, match="no such peer"):
        find_peers(["vlm=python"], {})
