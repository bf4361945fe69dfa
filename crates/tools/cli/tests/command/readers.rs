//! A segment that the host may only read, with the command and with the library.

use ginnel::{AttachOptions, Endpoint, Error, MappingKind, MessageChannel, SharedMemory, StreamChannel};
use kit::world::World;

#[test]
fn a_reader_can_read_and_gets_an_error_when_it_writes() {
    let world = World::new();
    world.good("segment create news --size 16M --members vm-a --readers host --memory dax --page 4K");
    let json = world.good("segment list --json").json();
    let news = json.as_array().unwrap().iter().find(|s| s["name"] == "news").unwrap();
    assert_eq!((&news["members"][0], &news["readers"][0]), (&"vm-a".into(), &"host".into()));
    assert_eq!((&news["memory"], &news["page"]), (&"dax".into(), &4096.into()));

    let options = AttachOptions { socket: world.socket(), ..AttachOptions::default() };
    let endpoint = Endpoint::attach_with("news", &options).unwrap();
    assert!(endpoint.is_read_only() && endpoint.memory().is_read_only());
    assert_eq!((endpoint.page(), endpoint.mapping_kind()), (4096, MappingKind::FILE));
    // The mapping begins with the header and contains the whole rest of the segment.
    assert_eq!(endpoint.memory().len(), 14 << 20);
    assert_eq!(endpoint.memory().load_acquire_u64(0), u64::from_le_bytes(*b"GINNELSG"));
    let refused = endpoint.listen::<MessageChannel>("x").err().unwrap();
    assert!(matches!(&refused, Error::ReadOnly { segment } if segment == "news"), "{refused}");
    let refused = endpoint.connect::<StreamChannel>("x").err().unwrap();
    assert!(matches!(refused, Error::ReadOnly { .. }));
    assert!(refused.to_string().contains("move it from `readers` to `members` of [segment.news]"));

    let said = world.expect(1, "ping news/x");
    assert!(said.err.contains("may only read segment news"), "{said:?}");
    let said = world.expect(1, "segment create x --size 4M --members host --memory cxl");
    assert!(said.err.contains("`dax` or `bar`"), "{said:?}");
    let said = world.expect(1, "segment create x --size 4M --members host --memory bar --page 2M");
    assert!(said.err.contains("pages of 4K"), "{said:?}");
}
