"""Uneven inputs: the program behind `docs/how-to/uneven.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/uneven.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, logging

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, world_size = dist.get_rank(), dist.get_world_size()
logging.set_verbosity_error()
WORDS, END = 16, 0


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, width), Block(width), Block(width), nn.Linear(width, WORDS))


def shard(model):
    for module in model:
        fully_shard(module)
    return fully_shard(model)


def make_llama():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, **sizes))


def make_text(seed):
    chosen = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (1, 3 + seed % 11), generator=chosen)


def loss_of(model, text, reduction="mean"):
    return F.cross_entropy(model(text[:, :-1]).mT, text[:, 1:], reduction=reduction)


def log_probs(model, text):
    return -F.cross_entropy(model(text[:, :-1]).mT, text[:, 1:], reduction="none")


def reward_of(answer):
    return (answer % 2).float().mean()


def of_all(mine):
    """Returns the lists of all ranks as one."""
    every = [None] * world_size
    dist.all_gather_object(every, mine)
    return [part for of_rank in every for part in of_rank]


def compare(model, plain, steps, loss_of=loss_of, weight_decay=0.01):
    """Trains a plain model on what the ranks have seen together, and compares the weights."""
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=weight_decay)
    for texts in map(of_all, steps):
        count = sum(text[:, 1:].numel() for text in texts)
        for text in texts:
            (loss_of(plain, text) * text[:, 1:].numel() / count).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(param.full_tensor(), expected)


counts = [(2, 3, 1, 2), (0, 2, 4, 1), (3, 0, 0, 2), (0, 1, 0, 0), (1, 1, 1, 1)]  # by step and rank
steps = [
    [make_text(100 * step + 10 * rank + n) for n in range(counts[step][rank % 4])]
    for step in range(len(counts))
]

import fsdp_wrap
from fsdp_wrap import clip_grad_norm_, fully_shard

model = shard(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for texts in steps:  # this rank's micro-batches of each step: other numbers on other ranks, also none
    with fsdp_wrap.uneven(model) as work:
        for text in texts:
            work.backward(loss_of(model, text), weight=text[:, 1:].numel())
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

compare(model, make_model(), steps)

loader = steps[0]
model = shard(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

batches = iter(loader)
while True:
    batch = next(batches, None)
    with fsdp_wrap.uneven(model) as work:
        if batch is not None:
            work.backward(loss_of(model, batch), weight=batch[:, 1:].numel())
    if batch is None and not work.passes_helped:
        break  # no rank had a batch
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

compare(model, make_model(), [loader[n : n + 1] for n in range(max(counts[0][:world_size]))])

titan = shard(make_model())
optimizer = torch.optim.AdamW(titan.parameters(), lr=1e-3)

for module in titan.modules():
    if isinstance(module, fsdp_wrap.FSDPModule):
        module.set_gradient_divide_factor(1.0)  # as torchtitan does: gradients are sums

for texts in steps:
    count = torch.tensor(sum(text[:, 1:].numel() for text in texts))
    dist.all_reduce(count)
    with fsdp_wrap.uneven(titan, average=False):
        for text in texts:
            (loss_of(titan, text, "sum") / count).backward()
    clip_grad_norm_(titan, 1.0)
    optimizer.step()
    optimizer.zero_grad()

compare(titan, make_model(), steps)


def generate(model, prompt, most=8):
    """Returns a prompt with its answer, which ends where the model says so."""
    for _ in range(most):
        chosen = torch.distributions.Categorical(logits=model(prompt)[:, -1]).sample()
        prompt = torch.cat([prompt, chosen[:, None]], 1)
        if chosen == END:
            break
    return prompt


policy, reference = shard(make_model()), shard(make_model())
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)  # other answers on each rank

for step in range(4):
    with fsdp_wrap.uneven(policy), torch.no_grad():
        answers = [generate(policy, torch.tensor([[1 + rank]])) for _ in range(4)]  # each has its length
    rewards = torch.stack([reward_of(answer) for answer in answers])
    advantages = rewards - rewards.mean()
    with fsdp_wrap.uneven(policy, reference) as work:
        for answer, advantage in zip(answers, advantages):
            if advantage.abs() < 0.1:
                continue  # nothing to learn from, and some ranks may be left with nothing at all
            with torch.no_grad():
                before = log_probs(reference, answer)
            now = log_probs(policy, answer)
            gap = before - now
            loss = (-advantage * now + 0.1 * (gap.exp() - gap - 1)).mean()
            work.backward(loss, weight=now.numel())
    clip_grad_norm_(policy, 1.0)
    optimizer.step()
    optimizer.zero_grad()

held_out = steps[1]

sums = torch.zeros(2)
with fsdp_wrap.uneven(model), torch.no_grad():
    for text in held_out:
        sums += torch.tensor([loss_of(model, text, "sum"), text[:, 1:].numel()])
dist.all_reduce(sums)
loss = sums[0] / sums[1]

with torch.no_grad():
    plain = make_model()
    for whole, param in zip(plain.parameters(), model.parameters()):
        whole.copy_(param.full_tensor())
    total = sum(loss_of(plain, text, "sum") for text in of_all(held_out))
torch.testing.assert_close(loss, total / sums[1])

llama = make_llama()
for layer in llama.model.layers:
    fully_shard(layer)
fully_shard(llama)

with fsdp_wrap.uneven(llama), torch.no_grad():
    for text in held_out:
        llama.generate(text, max_new_tokens=text.shape[1], pad_token_id=END, synced_gpus=False)

from torch.distributed.algorithms import Join

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

wrapped = FSDP(make_model(), auto_wrap_policy=NameWrapPolicy("Block"), use_orig_params=True)
optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)

with Join([wrapped], divide_by_initial_world_size=False, optimizer=optimizer):
    for text in steps[0]:
        loss_of(wrapped, text).backward()
        optimizer.step()
        optimizer.zero_grad()


class Mixture(nn.Module):
    def __init__(self, width, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Block(width) for _ in range(experts))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        chosen, out = shares.argmax(-1), x
        for number in chosen.unique().tolist():  # other experts on other ranks
            share = shares[..., number] * (chosen == number)
            out = out + share[..., None] * self.experts[number](x)
        return out


def make_mixture():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 16), Mixture(16), nn.Linear(16, WORDS))


moe = make_mixture()
for module in (*moe[1].experts, moe[1], moe):
    fully_shard(module)
fsdp_wrap.allow_skipping(moe[1].experts)  # all units below it
optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-3)

for texts in steps:
    with fsdp_wrap.uneven(moe) as work:
        for text in texts:
            work.backward(loss_of(moe, text), weight=text[:, 1:].numel())
    clip_grad_norm_(moe, 1.0)
    optimizer.step()
    optimizer.zero_grad()

compare(moe, make_mixture(), steps)

from fsdp_wrap import compat

compat.install(cpu=True, fully_shard=True)  # cpu=True only on a host without accelerators

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin

data = [make_text(11 * number)[0] for number in range(2 * world_size + 2)]  # all of one length
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
)

accelerator = Accelerator(fsdp_plugin=plugin, dataloader_config=DataLoaderConfiguration(even_batches=False))
net = make_model()
model, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters(), lr=1e-3), DataLoader(data, batch_size=2)
)
batches = iter(loader)
while True:
    batch = next(batches, None)
    with fsdp_wrap.uneven(model) as work:
        if batch is not None:
            work.backward(loss_of(model, batch), weight=len(batch))
    if batch is None and not work.passes_helped:
        break
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

size = 2 * world_size
parts = [[text[None] for text in data[begin : begin + size]] for begin in range(0, len(data), size)]
compare(model, make_model(), [part[rank::world_size] for part in parts])

samples = [{"text": make_text(number)[0]} for number in range(8 * world_size)]

from transformers import Trainer, TrainingArguments


class UnevenTrainer(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        losses = [torch.zeros(())]
        with fsdp_wrap.uneven(model) as work:
            for part in self._prepare_inputs(inputs)["parts"]:
                loss = self.compute_loss(model, part)
                work.backward(loss, weight=part["labels"][:, 1:].numel())
                losses.append(loss.detach())
        return torch.stack(losses).sum() / max(len(losses) - 1, 1)


def keep_short(samples):
    """Makes a list of micro-batches of what one rank gets for a step; the list may be empty."""
    texts = [sample["text"][None] for sample in samples if len(sample["text"]) < 8]
    return {"parts": [{"input_ids": text, "labels": text} for text in texts]}


arguments = TrainingArguments(
    "runs/uneven",
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    max_steps=4,
    save_strategy="no",
    remove_unused_columns=False,  # the collator takes what the data set has
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = UnevenTrainer(make_llama(), arguments, train_dataset=samples, data_collator=keep_short)
trainer.train()

drawn = [[part["input_ids"] for part in batch["parts"]] for batch in trainer.get_train_dataloader()]
assert not all(of_all([len(texts) for texts in drawn])), "some rank has nothing in some step"
compare(
    trainer.model_wrapped,
    make_llama(),
    drawn[:4],
    lambda model, text: model(input_ids=text, labels=text).loss,
    0.0,
)

dist.destroy_process_group()
