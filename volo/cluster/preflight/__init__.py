"""Are these machines fit for a run? One task per node: `srun --ntasks-per-node=1 python -m volo preflight`.

Node 0 waits for the others, asks each for a report (`node_report`), compares them (`findings`), has bandwidth measured
(`bandwidth`, by processes as a run would start them: `workers`, `worker`) and prints one table and a line per problem.
All nodes end with the same exit code: 0 fit, 2 bad flags or variables, 6 not fit.

Environment: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as for `distributed_train.sh` (the port after it is used), else
Slurm's. NODES names the nodes where SLURM_JOB_NODELIST doesn't: `NODES="n1 n2"` or `NODES=n[1-8]`.
"""
