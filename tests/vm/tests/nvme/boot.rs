//! Machines that start from an NVMe volume: by SeaBIOS, which reads a boot sector, and by OVMF, which reads Linux from a file system.
//! Both have drivers of their own, which know no shadow doorbells and poll.

use super::*;
use std::os::unix::fs::FileExt;

/// Prints the text in the last sector of the disk at the serial port.
#[rustfmt::skip]
const BOOT_SECTOR: [u8; 51] = [
    0x31, 0xc0,             // xor ax, ax
    0x8e, 0xd8,             // mov ds, ax
    0x8e, 0xd0,             // mov ss, ax
    0xbc, 0x00, 0x7c,       // mov sp, 0x7c00
    0xbe, 0x23, 0x7c,       // mov si, packet
    0xb4, 0x42,             // mov ah, 0x42 (read, by linear address, from the disk in dl)
    0xcd, 0x13,             // int 0x13
    0x72, 0x0e,             // jc stop
    0xbe, 0x00, 0x7e,       // mov si, 0x7e00
    0xba, 0xf8, 0x03,       // mov dx, 0x3f8
    // next:
    0xac,                   // lodsb
    0x84, 0xc0,             // test al, al
    0x74, 0x03,             // jz stop
    0xee,                   // out dx, al
    0xeb, 0xf8,             // jmp next
    // stop:
    0xf4,                   // hlt
    0xeb, 0xfd,             // jmp stop
    // packet: its length, one sector, to 0:0x7e00, and below the number of the sector.
    0x10, 0x00, 0x01, 0x00, 0x00, 0x7e, 0x00, 0x00, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// Starts a machine with a volume as its only disk. Returns QEMU, which prints what comes from the serial port.
fn machine(bed: &TestBed, volume: &Volume<'_>, more: &str) -> Result<Arc<HostJob>> {
    let qemu = newer_qemu()?;
    let device = volume.holder.device();
    let device = device.strip_suffix('}').context("an object")?;
    let device = format!("{device},\"bootindex\":0}}");
    bed.host_spawn(&format!(
        "exec {} -machine q35,memory-backend=ram -object memory-backend-memfd,id=ram,size=512M,share=on -m 512M -display none \
         -monitor none -nodefaults -no-user-config -serial stdio {more} -device '{device}'",
        qemu.display()
    ))
}

fn end(machine: &HostJob) -> Result<()> {
    machine.kill(9)?;
    machine.wait(PROMPT)?;
    Ok(())
}

#[test]
fn seabios_boots_from_a_volume() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    const TEXT: &str = "read by SeaBIOS from the last sector";
    for wait in ["poll", "adaptive"] {
        let bed = TestBed::new("nvme-seabios")?;
        let image = image(&bed, 64 << 20)?;
        let (file, last) = (std::fs::File::options().write(true).open(&image)?, (64_u64 << 20) / 512 - 1);
        let mut sector = [0; 512];
        sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
        sector[BOOT_SECTOR.len() - 8..BOOT_SECTOR.len()].copy_from_slice(&last.to_le_bytes());
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        file.write_all_at(&sector, 0)?;
        file.write_all_at(format!("{TEXT}\n\0").as_bytes(), last * 512)?;
        let volume = Volume::start(&bed, "disk", &format!("--wait {wait} --path {}", image.display()))?;
        let machine = machine(&bed, &volume, "")?;
        machine.wait_for_line(TEXT, PROMPT)?;
        end(&machine)?;
    }
    Ok(())
}

#[test]
fn ovmf_boots_linux_from_a_volume() -> Result<()> {
    let qemu = newer_qemu();
    kit::require!(qemu.is_ok(), "{:#}", qemu.unwrap_err());
    let (code, vars) = ("/usr/share/OVMF/OVMF_CODE_4M.fd", "/usr/share/OVMF/OVMF_VARS_4M.fd");
    kit::require!(Path::new(code).exists() && Path::new(vars).exists(), "no OVMF (package ovmf)");
    kit::require_programs!(&["mkfs.vfat", "mcopy"]);
    let bed = TestBed::new("nvme-ovmf")?;
    let image = image(&bed, 64 << 20)?;
    // OVMF offers its shell, which finds this script. Linux has the kernel in its own memory then, and finds no other disk.
    let script = bed.dir().join("startup.nsh");
    std::fs::write(&script, "@echo -off\r\nfs0:\\linux.efi console=ttyS0 panic=-1 ginnel=read-by-ovmf\r\n")?;
    let vars_here = bed.dir().join("vars.fd");
    std::fs::copy(vars, &vars_here)?;
    let file = image.display();
    bed.host(&format!(
        "mkfs.vfat -F 32 {file} && mcopy -i {file} {} ::linux.efi && mcopy -i {file} {} ::startup.nsh",
        bed.kernel().image.display(),
        script.display()
    ))?
    .ok()?;
    let volume = Volume::start(&bed, "disk", &format!("--path {file}"))?;
    let flash = format!(
        "-drive if=pflash,format=raw,readonly=on,file={code} -drive if=pflash,format=raw,file={}",
        vars_here.display()
    );
    let machine = machine(&bed, &volume, &flash)?;
    machine.wait_for_line("Command line: ", 4 * PROMPT).and_then(|line| {
        ensure!(line.contains("ginnel=read-by-ovmf"), "{line}");
        Ok(())
    })?;
    end(&machine)
}
