"""From what `data.path` names to a batch: where a token of your file passes, in order.

At the first start of a run (`tokens.prepare`):
1. `detect.look`: which format the files have. (`hf:NAME`: `hub.fetch` brings the files here first.)
2. `rows` (JSONL, csv, Parquet, ...) or `documents.PlainText`: the documents of each file, part by part.
3. `prepare`: each document's token ids (`encoding`, `tokenizer`), written as shards (`shards`).
   Text without a tokenizer goes another way: `text` reads and divides it, `snapshot` copies it.
4. `corpus.describe_corpus`: a description of all files with the hash of every block, `data/corpus.json` of the run.

At every start and while training:
5. `corpus.check_corpus` compares the files with their hashes; `corpus.Tokens` reads them by place, through `blocks`.
6. `batches.TokenBatches`: the samples of a window (`order`) as inputs and targets. `mixture.Mixture`: of several.
7. `prefetch.Prefetched`: the next window is read ahead.

Beside these: `splits` (what a file's name says), `widths` (whether ids have the declared dtype), `source` (which files
have changed since), `arrays` (short names of array types). A data set of the user's own needs none of this: `dataset`,
`samples`, and an example, `digits`.

To add a format of rows, see `rows`; of token ids, see `shards`.
"""
