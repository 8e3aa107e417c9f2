"""Fine-tune a small model to chat: data, LoRA, evaluation, one file of merged weights, and generated answers.

    pip install -e '.[clients]' && torchrun --nproc-per-node 2 examples/chat.py

The base model learns sentences about words of Python's library, such as `tuple in capitals is TUPLE`.
Adapters then learn to answer questions, with a loss on answers only. An answer must have all letters right.
The words asked about are not in the training data. Plain PyTorch loads the merged `runs/chat.pt`.

Prints:

    base: loss 0.53
    before: 0 % of 192 questions are answered
    chat: loss 0.05
    after: 94 % of 192 questions are answered
    tuple in capitals? TUPLE
    yield spelled out? y-i-e-l-d
    class last letter? s
"""

import re
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm.model import GPT, GPTConfig
from peft import LoraConfig, get_peft_model

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

CONFIG, POLICY = GPTConfig(layers=2, width=64, heads=4, context=40), NameWrapPolicy("Block")
BATCH, BASE_STEPS, CHAT_STEPS, HELD_OUT, RATE, SKIP = 64, 400, 150, 64, 5e-3, -100
QUESTIONS = "tuple in capitals?", "yield spelled out?", "class last letter?"


def read_words() -> tuple[list[str], list[str]]:
    """Reads short words of Python's library: those to be asked about, and those to learn from."""
    files = Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py")
    short_words = {word for file in files for word in re.findall(r"\b[a-z]{3,5}\b", file.read_text("utf-8"))}
    words = sorted(short_words - {question.split()[0] for question in QUESTIONS})
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(0)).tolist()
    return [words[index] for index in order[:HELD_OUT]], [words[index] for index in order[HELD_OUT:]]


def texts_of(word: str, chat: bool) -> list[str]:
    """Makes three texts. Byte 1 begins a question, byte 2 the words of the model, and byte 3 ends them."""
    facts = {"in capitals": word.upper(), "spelled out": "-".join(word), "last letter": word[-1]}
    form = "\1{} {}?\2{}\3" if chat else "\2{} {} is {}\3"
    return [form.format(word, what, fact) for what, fact in facts.items()]


def to_batch(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens, and the label of each: the next token if the model is to say it, else SKIP."""
    tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor([*text.encode()]) for text in texts], True)
    says, following = (tokens == 2).cumsum(1)[:, :-1] > 0, tokens[:, 1:]
    return tokens[:, :-1], following.where(says & (following != 0), SKIP)


def train(name: str, model: FSDP, words: list[str], steps: int) -> None:
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    torch.manual_seed(1 + dist.get_rank())  # other words on each
    for step in range(steps):
        chosen = zip(torch.randint(len(words), (BATCH,)), torch.randint(3, (BATCH,)))
        tokens, labels = to_batch([texts_of(words[word], name == "chat")[which] for word, which in chosen])
        losses = F.cross_entropy(model(tokens).mT, labels, ignore_index=SKIP, reduction="sum")
        dist.all_reduce(count := (labels != SKIP).sum())  # of the learned tokens on all ranks
        loss = losses * dist.get_world_size() / count  # their mean, since gradients are averaged over ranks
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, 2 - 2 * step / steps)
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"{name}: loss {loss.item():.2f}", flush=True)


@torch.no_grad()
def judge(when: str, model: FSDP, words: list[str]) -> None:
    """Tells how many questions are answered, of which each rank asks its share."""
    asked = [text for word in words for text in texts_of(word, chat=True)]
    tokens, labels = to_batch(asked[dist.get_rank() :: dist.get_world_size()])
    dist.all_reduce(right := ((model(tokens).argmax(-1) == labels) | (labels == SKIP)).all(1).sum())
    if dist.get_rank() == 0:
        print(f"{when}: {100 * right.item() / len(asked):.0f} % of {len(asked)} questions are answered")


def main() -> None:
    dist.init_process_group("gloo")
    held_out, learned = read_words()
    torch.manual_seed(0)  # the same weights on every rank
    model = FSDP(GPT(CONFIG), auto_wrap_policy=POLICY, use_orig_params=True)
    train("base", model, learned, BASE_STEPS)
    judge("before", model, held_out)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["qkv", "out", "mlp_in", "mlp_out"])
    net = GPT(CONFIG)
    net.load_state_dict(dict(fsdp_wrap.weight_source(model)))  # every rank takes part
    torch.manual_seed(0)  # the same adapters on every rank
    model = FSDP(get_peft_model(net, lora), auto_wrap_policy=POLICY, use_orig_params=True)
    train("chat", model, learned, CHAT_STEPS)
    judge("after", model, held_out)
    weights = dict(fsdp_wrap.weight_source(model))  # with the adapters merged
    if dist.get_rank() == 0:
        Path("runs").mkdir(exist_ok=True)
        torch.save(weights, "runs/chat.pt")
        plain = GPT(CONFIG)  # torch alone from here on
        plain.load_state_dict(torch.load("runs/chat.pt"))
        for question in QUESTIONS:
            text = bytearray(f"\1{question}\2".encode())
            while len(text) < CONFIG.context and text[-1] != 3:
                text.append(int(plain(torch.tensor([[*text]]))[0, -1].argmax()))
            print(question, text.decode(errors="replace").partition("\2")[2][:-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
