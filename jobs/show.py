"""One row's answers on the terminal, each as its thread tree."""

from typing import TYPE_CHECKING, Any

from jobs.console import without_controls

if TYPE_CHECKING:
    from rich.tree import Tree


def print_request(value: dict[str, Any]) -> None:
    """Print what `jobs.service.request_detail` says of a row."""
    from rich.console import Console

    name = f" id {value['id']}" if value["id"] is not None else ""
    console = Console(highlight=False, markup=False)
    console.print(without_controls(f"row {value['row']}{name}: {value['state']}"))
    if value["error_code"]:
        console.print(without_controls(f"{value['error_code']}: {value['error']}"))
    for sample in value["samples"]:
        console.print(_tree_of(sample))


def _tree_of(sample: dict[str, Any]) -> "Tree":
    from rich.text import Text
    from rich.tree import Tree

    head = f"sample {sample['sample']}: {sample['output_tokens']} tokens, {sample['finish_reason']}"
    if sample["stats"] is not None:
        head += f", {_count(sample['stats']['threads'], 'thread')}, {_count(sample['stats']['steps'], 'step')}"
        head += _drafting_of(sample["stats"])
    top = Tree(Text(head))
    for number, turn in enumerate(sample["turns"], start=1):
        label = Text(f"turn {number}: {turn['output_tokens']} tokens, {turn['finish_reason']}", style="dim")
        label.append("\n" + without_controls(turn["content"]), style="not dim")
        top.add(label)
    if not sample["tree"]:
        top.add(Text(without_controls(sample["output"])))
    inside: dict[int, Tree] = {}
    """Each node's own branch."""
    around: dict[int, Tree] = {}
    """The branch that a node hangs on."""
    for node in sample["tree"]:  # depth first: parents come before their children
        if node["parent"] is None:
            branch = top
        elif node["kind"] == "detail":
            branch = inside[node["parent"]]
        else:
            branch = around[node["parent"]]
        label = Text(_label(node), style="dim")
        label.append("\n" + without_controls(node["text"]), style="not dim")
        around[node["node"]] = branch
        inside[node["node"]] = branch.add(label)
    return top


def _label(node: dict[str, Any]) -> str:
    span = f"tokens {node['start']}-{node['end']}, steps {node['first_step']}-{node['last_step']}"
    return f"{node['kind']}, thread {node['thread']}, {span}"


def _drafting_of(stats: dict[str, Any]) -> str:
    """A decoder's own figures; nothing of an answer from vLLM."""
    if stats.get("forwards") is None:
        return ""
    shares = f"DE {stats['decoding_efficiency']:.2f}, HR {stats['hit_rate']:.2f}, AL {stats['acceptance_length']:.2f}"
    nodes = f"{_count(stats['draft_nodes'], 'draft node')}, {_count(stats['verify_nodes'], 'verified node')}"
    return f"; {_count(stats['forwards'], 'forward')}, {shares}, {nodes}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
