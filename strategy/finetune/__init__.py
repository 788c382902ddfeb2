"""The fine-tuning command: one YAML file in, a trained model or adapter out.

    cli.py            arguments in, exit code out
    run_file/         YAML + overrides -> RunConfig, or all that is wrong with them, with places
    config.py         RunConfig: what every key means
                          v
    job.py            RunConfig -> Job: data, model and checkpoint, checked before anything is written
      data/           JSONL, chats, text -> documents -> tokens -> rows of one length -> batches
      model/          directory or hub -> a model on the meta device, with its adapter
                          v
    train.py          the steps of a run in their order
      processes.py    the other processes of this machine; launch.py: how many there are
      loop.py         rows in, optimizer steps out; evaluate.py, guards.py, schedule.py
      objective.py    what a batch, its loss and its weight are, for the loop and for plans
      supervised.py   the first of them: the next token; loss.py
      watchers.py     the callbacks and loggers of the run
      export.py       what was trained, in the formats of transformers and peft

Which of them may import which is a contract in pyproject.toml.
"""
