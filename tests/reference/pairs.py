"""The score of one sentence as the papers define it: one mask after the other, by transformers alone, all logits."""

import torch


def score(model, tokenizer, text, continues, *, name):
    """Salazar et al., 2020 ("sum"), for each token ("mean"); Kauf and Ivanova, 2023 ("word-l2r"). In nats.

    model, tokenizer: of transformers. continues: token → whether its spelling puts it inside a word.
    """
    ids = tokenizer(text)["input_ids"]
    tokens, special = tokenizer.convert_ids_to_tokens(ids), {*tokenizer.all_special_tokens}
    total = 0.0
    for place in range(1, len(ids) - 1):
        row = list(ids)
        row[place] = tokenizer.mask_token_id
        for following in range(place + 1, len(ids) - 1 if name == "word-l2r" else 0):
            if special & {*tokens[following - 1 : following + 1]} or not continues(tokens[following]):
                break  # another word
            row[following] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row])).logits[0, place].double()
        total += float(logits.log_softmax(-1)[ids[place]])
    return total / (len(ids) - 2) if name == "mean" else total
