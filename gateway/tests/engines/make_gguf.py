"""Writes a llama of two layers and 64 dimensions, with random weights, as a GGUF file of half a megabyte.

It says nothing sensible, but a real engine loads it in a second and streams from it, which is what the gateway's tests
need: downloads are slow, may fail, and are not needed to show that processes start, stream and stop.

    python make_gguf.py FILE
"""

import sys

import gguf
import numpy as np

WIDTH, LAYERS, HEADS, FEED_FORWARD, CONTEXT = 64, 2, 4, 128, 2048
WORDS = [f"▁{a}{b}" for a in "bdklmnrs" for b in "aeiou"] + list(".,!?")
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def vocabulary():
    """Three control tokens, every byte (so that any prompt can be encoded), and a few syllables to answer with."""
    kind = gguf.TokenType
    tokens = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    tokens += [(word, kind.NORMAL) for word in WORDS]
    return tokens


def weights(tokens):
    random = np.random.default_rng(7)

    def matrix(rows, columns):
        return random.normal(0.0, columns**-0.5, (rows, columns)).astype(np.float32)

    # Dimension 0 is a constant through the whole network, and the output layer uses it to favour syllables: the model
    # then never ends on its own and never emits half a UTF-8 character, so that a test's max_tokens is the exact length.
    embedding = matrix(len(tokens), WIDTH)
    embedding[:, 0] = 8.0
    output = matrix(len(tokens), WIDTH)
    output[:, 0] = [4.0 if kind == gguf.TokenType.NORMAL else -4.0 for _, kind in tokens]

    yield "token_embd.weight", embedding
    yield "output_norm.weight", np.ones(WIDTH, np.float32)
    yield "output.weight", output
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for norm in ("attn_norm", "ffn_norm"):
            yield f"{block}.{norm}.weight", np.ones(WIDTH, np.float32)
        for projection in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{block}.{projection}.weight", matrix(WIDTH, WIDTH)
        for projection in ("ffn_gate", "ffn_up"):
            yield f"{block}.{projection}.weight", matrix(FEED_FORWARD, WIDTH)
        yield f"{block}.ffn_down.weight", matrix(WIDTH, FEED_FORWARD)


def write(path):
    tokens = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny-random-llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    writer.add_tokenizer_model("llama")
    writer.add_token_list([text.encode() for text, _ in tokens])
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([kind for _, kind in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT_TEMPLATE)

    for name, tensor in weights(tokens):
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(sys.argv[1])
