//! Programs of the distribution.

use super::{Done, MPICH, OPENMPI, SIZE, beside, is_soak, run, run_without};
use kit::skip::missing;
use programs::verbs::Verbs;

/// The input of HPCC: a system of 400 equations, for four ranks in a square. The sizes of its other problems follow from that.
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
    kit::require_programs!(&["hpcc", "mpirun.openmpi"]);
    let verbs = Verbs::sized(SIZE);
    std::fs::write(verbs.world.files().join("hpccinf.txt"), HPCC_INPUT).unwrap();
    run(&verbs, &OPENMPI, 4, "hpcc");
    let said = std::fs::read_to_string(verbs.world.files().join("hpccoutf.txt")).unwrap();
    assert!(said.lines().any(|line| line == "Success=1") && !said.contains("FAILED"), "{said}");
    let failed = said.lines().filter(|line| line.contains("completed and failed residual checks"));
    let failed: Vec<_> = failed.map(str::trim_start).collect();
    assert!(failed.len() == 2 && failed.iter().all(|line| line.starts_with("0 tests")), "{said}");
}

#[test]
fn a_crystal_melts_in_the_same_way_as_without_ginnel() {
    kit::require_programs!(&["lmp", "mpirun.openmpi"]);
    let verbs = Verbs::sized(SIZE);
    let program = format!("lmp -log none -in {}", beside("melt.in").display());
    for ranks in [2, 4] {
        let Done { said, sent } = run(&verbs, &OPENMPI, ranks, &program);
        let expected = thermo(&run_without(&verbs, ranks, &program));
        assert!(expected.len() == 9 && thermo(&said) == expected, "{ranks} ranks: {expected:#?}\n{said}");
        // The ranks send the positions of atoms near the border 200 times.
        assert!(sent.iter().all(|bytes| *bytes > 1_000_000), "{ranks} ranks: {sent:?}");
    }
}

/// Returns what LAMMPS prints of temperature, energies and pressure: a table behind a line of titles.
fn thermo(said: &str) -> Vec<String> {
    let mut lines = said.lines().skip_while(|line| !line.trim_start().starts_with("Step "));
    let is_row = |line: &&str| line.split_whitespace().next().is_some_and(|word| word.parse::<u32>().is_ok());
    lines.next();
    lines.take_while(is_row).map(str::to_owned).collect()
}

#[test]
fn netpipe_receives_messages_of_all_lengths_intact() {
    for (mpi, program) in [(MPICH, "NPmpich2"), (OPENMPI, "NPopenmpi")] {
        if let Some(missing) = missing(&[program, mpi.starter]) {
            kit::skip!("{missing} is not installed: `scripts/setup test` installs it");
            continue;
        }
        let verbs = Verbs::sized(SIZE);
        // For messages that are expected, from both ends at the same time; in the soak also from one end, and for unexpected ones.
        for how in if is_soak() { &["", "-a", "-a -2"][..] } else { &["-a -2"] } {
            let Done { said, sent } = run(&verbs, &mpi, 2, &format!("{program} -i {how} -n 20 -u 2000000"));
            let rows: Vec<_> = said.lines().filter(|line| line.contains(" bytes ")).collect();
            let is_intact = |row: &&str| row.ends_with("Integrity check passed");
            assert!(rows.len() > 35 && rows.iter().all(is_intact), "{program} {how}: {said}");
            // 20 messages of each length, up to 2 MB.
            assert!(sent.iter().all(|bytes| *bytes > 20_000_000), "{program} {how}: {sent:?}");
        }
    }
}

#[test]
fn the_energy_of_water_is_correct() {
    /// The Hartree-Fock energy in the basis STO-3G, at the geometry of the input.
    const KNOWN: f64 = -74.963;
    kit::require_programs!(&["nwchem.openmpi", "mpirun.openmpi"]);
    let verbs = Verbs::sized(SIZE);
    let program = format!("nwchem.openmpi {}", beside("water.nw").display());
    let energy = |said: &str| -> f64 {
        let line = said.lines().find(|line| line.contains("Total SCF energy ="));
        line.unwrap_or_else(|| panic!("{said}")).split('=').nth(1).unwrap().trim().parse().unwrap()
    };
    let Done { said, .. } = run(&verbs, &OPENMPI, 2, &program);
    let (found, expected) = (energy(&said), energy(&run_without(&verbs, 2, &program)));
    assert!((found - expected).abs() < 1e-6 && (found - KNOWN).abs() < 1e-3, "{found}, not {expected}");
}
