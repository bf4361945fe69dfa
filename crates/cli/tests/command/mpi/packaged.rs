//! Programs as the distribution has them.

use super::{OPENMPI, SIZE, run};
use crate::stage::have;
use crate::verbs::Verbs;

/// What HPCC is told: a system of 400 equations, for four ranks in a square. Its other problems follow from that size.
const HPCC_INPUT: &str = "\
HPLinpack benchmark input file
Ginnel
HPL.out      output file name
8            device out (a file)
1            # of problem sizes
400          Ns
1            # of NBs
80           NBs
0            PMAP
1            # of process grids
2            Ps
2            Qs
16.0         threshold
1            # of panel fact
2            PFACTs
1            # of recursive stopping criteria
4            NBMINs
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact
1            RFACTs
1            # of broadcast
1            BCASTs
1            # of lookahead depth
1            DEPTHs
2            SWAP
64           swapping threshold
0            L1
0            U
1            Equilibration
8            memory alignment in double
##### (ignored)
0            # of additional problem sizes for PTRANS
1200         values of N
0            # of additional blocking sizes for PTRANS
40           values of NB
";

#[test]
fn all_residuals_of_hpcc_pass() {
    if !have(&["hpcc", "mpirun.openmpi"]) {
        return;
    }
    let verbs = Verbs::sized(SIZE);
    std::fs::write(verbs.world.files().join("hpccinf.txt"), HPCC_INPUT).unwrap();
    run(&verbs, &OPENMPI, 4, "hpcc");
    let said = std::fs::read_to_string(verbs.world.files().join("hpccoutf.txt")).unwrap();
    assert!(said.lines().any(|line| line == "Success=1") && !said.contains("FAILED"), "{said}");
    let failed = said.lines().filter(|line| line.contains("completed and failed residual checks"));
    let failed: Vec<_> = failed.map(str::trim_start).collect();
    assert!(failed.len() == 2 && failed.iter().all(|line| line.starts_with("0 tests")), "{said}");
}
