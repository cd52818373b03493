import re
import shlex
from pathlib import Path

import pytest

from tests.support.cli_runner import Run

MODELS = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x).mean()


class NoLoss(Net):
    def forward(self, x):
        return self.inner(x)


class Branch(Net):
    def forward(self, x):
        return self.inner(x).mean() if x.sum() > 0 else self.skipped(x)

    def skipped(self, x):
        self.skips = getattr(self, "skips", 0) + 1
        return x.mean()


class Misspelt(Net):
    def forward(self, x):
        return self.iner(x).mean()


def made(model, columns=8):
    return lambda: (model(), {"x": torch.zeros(4, columns)})


class Talks(Net):
    def forward(self, x):
        print("shape", x.shape)
        return self.inner(x).mean()


class Unnamed(Net):
    def forward(self, *inputs):
        return self.inner(inputs[0]).mean()


net, no_loss, branch, misspelt, talks = map(made, (Net, NoLoss, Branch, Misspelt, Talks))
no_names = lambda: (Unnamed(), [torch.zeros(4, 8)])
no_samples = lambda: (Net(), {"x": torch.zeros(0, 8)})
wide = made(Net, 9)
nothing, alone, listed = (lambda: None), Net, (lambda: (Net(), {"x": [torch.zeros(4, 8)]}))


def fails():
    return 1 / 0


def leaves():
    raise SystemExit(3)
"""
FILES = {
    "misspelt.toml": 'name = "mine"\n[[group]]\ndevise = "cpu"\nnum_nodes = 1\ndevices_per_node = 4\n',
    "torn.toml": 'name = "mine\n',
    "space.toml": "zero_stages = [4]\n",
    "torn.json": '{"version": 1, ',
    "empty.json": "{}",
}
GPT = "gpt:layers=1,hidden=32,heads=4,vocab=64,seq=16"
ON = "--cluster cpu:1x4 --global-batch 8"

MISTAKES = (
    (2, f"search {GPT} --cluster h200:1x8 --global-batch 8", "Unknown device profile 'h200'. Did you mean 'h200-sxm-141gb'?"),
    (2, f"search {GPT} --cluster h100-sxm5-80gb --global-batch 8", "Give nodes and devices of a node as in 'h100-sxm5-80gb:1x8'"),
    (2, f"search {GPT} --cluster cpu:0x4 --global-batch 8", "Give at least 1 node and 1 device a node"),
    (2, f"search {GPT} --cluster cpu:99999999x8 --global-batch 8", "The cluster has 8e+08 devices. Give at most 1,048,576"),
    (2, f"search {GPT} --cluster none.toml --global-batch 8", "Cannot read none.toml: no such file or directory"),
    (2, f"search {GPT} --cluster torn.toml --global-batch 8", "torn.toml, line 1: This is not TOML"),
    (2, f"search {GPT} --cluster misspelt.toml --global-batch 8", "misspelt.toml, line 3: Unknown key 'devise'. Did you mean 'device'?"),
    (2, f"search gtp:layers=2 {ON}", "Unknown kind of model 'gtp'. Did you mean 'gpt'?"),
    (2, f"search gpt {ON}", "'gpt' is a kind of model, and no model yet. Write hf:TYPE or its sizes, for example gpt:layers=4"),
    (2, f"search ./folder/my.py:net {ON}", "'./folder/my.py' is the path of a file, and no module. Start in the folder that holds it, and write my:net"),
    (2, f"search gpt:layer=2 {ON}", "Unknown gpt setting 'layer'. Did you mean 'layers'?"),
    (2, f"search hf:gpt22 {ON}", "Did you mean gpt2"),
    (2, f"search nowhere.module:make {ON}", "Cannot import module 'nowhere.module'"),
    (2, f"search MODELS:nett {ON}", "No function 'nett' in module MODELS. Did you mean net?"),
    (2, f"search MODELS:fails {ON}", "The factory failed: ZeroDivisionError: division by zero"),
    (2, f"search MODELS:leaves {ON}", "The factory failed: SystemExit: 3"),
    (1, f"search MODELS:no_names {ON}", "Forward takes *inputs, and no plan has inputs without a name. Write its parameters by name"),
    (1, f"search MODELS:no_samples {ON}", "The example inputs hold no sample. Give two or more"),
    (2, f"search MODELS:listed {ON}", "The example input 'x' is a list, not a tensor"),
    (2, f"search MODELS:nothing {ON}", "got NoneType. Return (model, {'input_ids': ...})"),
    (2, f"search MODELS:alone {ON}", "Cannot make example inputs for Net"),
    (1, f"search MODELS:no_loss {ON}", "NoLoss: The model returns no scalar loss: outputs of shape (2, 8)"),
    (1, f"search MODELS:branch {ON}", "MODELS.py:21: `return self.inner(x).mean() if x.sum() > 0 else self.skipped(x)` depends on the values of tensors, which cannot be traced. Use torch.where, a mask or a tensor as index, or decide it outside forward. Or move the line into a separate module"),
    (1, f"search MODELS:misspelt {ON}", "has no attribute 'iner'"),
    (1, f"search MODELS:wide {ON}", "Check the shapes of the example inputs"),
    (2, f"search MODELS:net {ON} --seq 32", "Leave --seq out"),
    (2, f"search MODELS:net {ON} --precision fp9", "Unknown precision 'fp9'. Did you mean 'fp8'?"),
    (2, f"search MODELS:net {ON} --space quik", "Unknown space 'quik'. Did you mean 'quick'?"),
    (2, f"search MODELS:net {ON} --space space.toml", "space.toml: Missing key 'name'"),
    (2, f"search MODELS:net {ON} --storage nowhere", "--storage: Cannot open the storage 'nowhere'"),
    (2, f"search MODELS:net {ON} --optimizer adamm", "Unknown optimizer 'adamm'. Did you mean 'adam'?"),
    (2, f"search MODELS:net {ON} --pin tpp=2", "Unknown pin 'tpp'. Did you mean 'tp'?"),
    (2, f"search MODELS:net {ON} --pin tp", "Write for example tp=4"),
    (2, f"search MODELS:net {ON} --pin tp=two", "The value 'two' of tp is not a whole number"),
    (2, f"search MODELS:net {ON} --pin tp=1{'0' * 20}", "of tp has more than 18 digits"),
    (2, f"search MODELS:net {ON} --pin schedule=1F1", "Unknown schedule '1F1'. Did you mean '1F1B'?"),
    (3, f"search MODELS:net {ON} --pin tp=3", "tp=3. Drop one of the pins named"),
    (3, "search MODELS:net --cluster cpu:1x4 --global-batch 6 --pin dp_replicate=4", "take another global batch"),
    (3, f"search {GPT} --cluster cpu:1x1?memory=1MB --global-batch 8", "Take more or larger devices"),
    (2, f"search MODELS:net {ON} -o no/plan.json", "Cannot write no/plan.json: no such file or directory"),
    (2, f"sweep MODELS:net {ON} --scale link=2", "Did you mean 'link.bandwidth' or 'link.latency'?"),
    (2, "search hf:gpt2?n_layer=2&num_hidden_layers=3 --cluster cpu:1x4 --global-batch 8", "'n_layer' and 'num_hidden_layers' are one setting"),
    (2, "search hf:?n_layer=2 --cluster cpu:1x4 --global-batch 8", "Unknown model type 'hf:'"),
    (2, "search :net --cluster cpu:1x4 --global-batch 8", "Unknown kind of model ''"),
    (2, f"search {GPT} --cluster cpu:1x4?nics=1&nics=2 --global-batch 8", "The option 'nics' is given twice. Keep one of them"),
    (2, f"search {GPT} --cluster cpu:1x4?ranks=2 --global-batch 8", "'ranks' does not go with 'cpu:1x4'. Leave it out"),
    (2, f"search MODELS:net {ON} --optimizer adamw:bytes=2:bytes=4", "'2:bytes=4' of the optimizer"),
    (2, "show .", "Cannot read .: is a directory. Name a file that 'autopar search ... -o FILE' wrote"),
    (2, f"sweep MODELS:net {ON} --scale link.bandwidth=1 --scale link.latency=2", "--scale is given twice. Keep one of them."),
    (2, f"search MODELS:net {ON} -o ''", "--output is empty. Give it a value, or leave it out."),
    (2, f"search '' {ON}", "MODEL is empty. Give it a value."),
    (2, f"sweep MODELS:net {ON} --scale device.memory=1e300", "device.memory x 1e+300 is no finite number"),
    (2, "search hf:gpt2?n_layer=2,n_embd=32 --cluster cpu:1x4 --global-batch 8", "Separate them by '&'"),
    (2, "validate --from-run . --leave-one-out", "--leave-one-out has no effect beside --from-run. Leave it out"),
    (2, "verify torn.json --pin tp=2", "--pin has no effect on a plan. Leave it out"),
    (2, f"verify {GPT} --model MODELS:net", "--model has no effect without a plan. Leave it out"),
    (2, "trace MODELS:net --batch 3", "--batch 3 does not go with a factory that returns example inputs, here of 4 samples. Leave --batch out"),
    (2, f"sweep MODELS:net {ON} --scale link.bandwidth=1 --pin opaque=outer", "'outer'"),
    (2, "show none.json", "Make one with 'autopar search ... -o FILE'"),
    (2, "show torn.json", "The plan file is cut off"),
    (2, "compare torn.json torn.json", "torn.json, line 1, column 16: The plan file is cut off"),
    (2, "verify torn.json", "The plan file is cut off"),
    (2, "explain empty.json", "empty.json: Missing key 'version'"),
    (2, "verify MODELS:net", "write --cluster cpu:1x4"),
    (2, "verify torn.json --run-timeout inf", "--run-timeout is inf. Give a number up to 1e+09."),
    (2, f"search MODELS:net {ON} --timeout 1e10", "--timeout is 1e+10. Give a number up to 1e+09."),
    (2, "profile links -o l.toml --budget 1e300", "--budget is 1e+300. Give a number up to 1e+09."),
    (2, "validate none.csv", "Cannot read none.csv: no such file or directory"),
)  # fmt: skip


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module of the user in the folder where the command is started; its name is new for each test."""
    name = re.sub(r"\W", "_", f"models_{tmp_path.name}")
    for file, text in (FILES | {f"{name}.py": MODELS}).items():
        (tmp_path / file).write_text(text)
    return name


@pytest.mark.slow
@pytest.mark.parametrize(("code", "command", "says"), MISTAKES, ids=[command for _, command, _ in MISTAKES])
def test_a_mistake_is_told_with_what_to_do(module: str, run: Run, code: int, command: str, says: str) -> None:
    done = run(*shlex.split(command.replace("MODELS", module)))
    assert done.code == code
    assert says.replace("MODELS", module) in done.error
    assert done.err == f"error: {done.error}\n", "nothing stands beside it"
    assert len(re.findall(r"(?<!\.)[.?!](?=\s|$)", done.error)) <= 3


def test_a_model_of_the_user_is_found_where_the_command_starts_and_may_print(module: str, run: Run) -> None:
    found = run("trace", f"{module}:talks", "--json").json
    assert found["parameters"] == 8 * 8 + 8 and found["operators"]["aten.linear.default"] == 1
