"""The fine-tuning command: one YAML file in, a trained model or adapter out.

    cli.py         arguments in, exit code out
                          v
    run_file/      YAML + overrides -> RunConfig, or all that is wrong with them, with places
                          v
    run/           a run in its order: `job.py` checks data, model and checkpoint, `train.py` does the steps
      data/        JSONL, chats, text -> documents -> tokens -> rows of one length -> batches
      model/       directory or hub -> a model on the meta device, with its adapter
      objectives/  what a run trains for: the loss of a batch, its weight and metrics
      training/    rows in, optimizer steps out: loop, evaluation, optimizer, learning rate
      process/     the other processes of this machine, signals, and why a run ended early
      output/      where a run writes, and from which checkpoint it goes on
      disk_cache.py  what was computed or copied before, each entry whole or not at all
                          v
    export/        what was trained, in the formats of transformers and peft, verified
    plan/          what a run would hold, without running it

Which of them may import which is a contract in pyproject.toml.
"""
