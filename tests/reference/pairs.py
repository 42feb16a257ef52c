"""The score of one sentence as the papers define it: one mask after the other, by transformers alone, all logits."""

import torch


def score(model, tokenizer, text, continues, *, name):
    """Salazar et al., 2020 ("sum"), for each token ("mean"); Kauf and Ivanova, 2023 ("word-l2r"). In nats.

    model, tokenizer: of transformers. continues: token → whether its spelling puts it inside a word.
    """
    ids = tokenizer(text)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    total = 0.0
    for place in range(1, len(ids) - 1):
        row = list(ids)
        row[place] = tokenizer.mask_token_id
        following = place + 1
        while name == "word-l2r" and following < len(ids) - 1 and _joined(tokenizer, tokens, following, continues):
            row[following] = tokenizer.mask_token_id
            following += 1
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, place].double()
        total += float(logits.log_softmax(-1)[ids[place]])
    return total / (len(ids) - 2) if name == "mean" else total


def _joined(tokenizer, tokens, place, continues):
    """Whether the token at a place belongs to the word of the token before it."""
    special = {tokens[place], tokens[place - 1]} & {*tokenizer.all_special_tokens}
    return continues(tokens[place]) and not special
