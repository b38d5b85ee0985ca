# Sourced by the scripts beside it: goes to the repository's root, takes DIR from the arguments.
cd "$(dirname "$0")/../.."
out=build/nsight
if [[ $# -gt 0 && $1 != -* ]]; then
  out=$1
  shift
fi
python=${PYTHON:-python3}
