# The bare limit: start COUNT processes in a loop and wait for them.
# sh bare.sh COUNT MASTER_PORT PROGRAM [ARGS]
export WORLD_SIZE=$1 LOCAL_WORLD_SIZE=$1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$2 TORCHELASTIC_RESTART_COUNT=0
count=$1 rank=0 pids=
shift 2
trap 'kill $pids' TERM
while [ $rank -lt $count ]; do
    RANK=$rank LOCAL_RANK=$rank "$@" &
    pids="$pids $!"
    rank=$((rank + 1))
done
wait || wait
