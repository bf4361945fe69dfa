//! Declaring members and segments at run time: the requests of `ADMIN`.
//!
//! The requests are JSON objects; `op` selects the operation, and the other keys are those of the configuration file.
//!
//! | `op` | keys | answer |
//! |---|---|---|
//! | `segment-create` | `name`, and as in `[segment.NAME]` | `{"segment":{"name","size","wished","path","members","readers","memory","page"}}` |
//! | `segment-remove` | `name`, `force` | `{}` |
//! | `vm-add` | `name`, and as in `[vm.NAME]` | `{"vm":{"name","number","socket","vectors"}}` |
//! | `vm-remove` | `name` | `{}` |

use super::config;
use super::config::doubts::{doubt_of_segment, doubt_of_vm};
use super::pending_segments::{PendingSegment, WantedBy};
use super::server::Server;
use ginnel_broker::broker::{ClientId, unrecorded};
use ginnel_broker::declared::{SegmentSpec, VmSpec};
use ginnel_broker::limits::MAX_SEGMENTS_PER_MEMBER;
use ginnel_broker::reply::{self, Refusal};
use ginnel_layout::wire::ErrorCode;
use ginnel_layout::{HOST_MEMBER, Name};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use tracing::{info, warn};

fn invalid(text: impl ToString) -> Refusal {
    Refusal::new(ErrorCode::INVALID, text.to_string())
}

impl Server {
    /// Performs an administrator's request, and answers it at once or when it is done.
    pub(super) fn admin(&mut self, client: ClientId, request: u32, text: &str) {
        if let Some(result) = self.administrate(client, request, text).transpose() {
            self.answer_admin(client, request, result);
        }
    }

    pub(super) fn answer_admin(&mut self, client: ClientId, request: u32, result: Result<Value, Refusal>) {
        // The change must be in the journal before it is answered.
        self.run_effects();
        match result {
            Ok(answer) => self.send_text(client, request, &answer.to_string()),
            Err(refusal) => self.send_packets(client, vec![(reply::refusal(request, &refusal), vec![])]),
        }
    }

    /// Returns the answer, or `None` if it comes later.
    fn administrate(&mut self, client: ClientId, request: u32, text: &str) -> Result<Option<Value>, Refusal> {
        let Some(who) = self.broker.who(client) else { return Ok(None) };
        if !self.is_administrator(who) {
            let text =
                "only root, the daemon's user and members of daemon.admin_group may do this, on the host";
            return Err(Refusal::new(ErrorCode::DENIED, text));
        }
        let uid = who.uid;
        let mut keys: Map<String, Value> = serde_json::from_str(text)
            .map_err(|error| invalid(format!("the request is not a JSON object: {error}")))?;
        let op = text_key(&mut keys, "op")?;
        let name = text_key(&mut keys, "name")?;
        let force = match keys.remove("force") {
            None => false,
            Some(Value::Bool(force)) if op == "segment-remove" => force,
            Some(_) => return Err(invalid("`force` is true or false, and only for segment-remove")),
        };
        info!(uid, op, name, "administration");
        if !op.ends_with("-remove") && !self.journal.takes() {
            return Err(unrecorded());
        }
        match op.as_str() {
            "segment-create" => return self.segment_create(client, request, name, spec(keys)?),
            "segment-remove" => self.segment_remove(&name, force, spec::<NoKeys>(keys)?),
            "vm-add" => self.vm_add(&name, spec(keys)?),
            "vm-remove" => self.vm_remove(&name, spec::<NoKeys>(keys)?),
            other => Err(invalid(format!(
                "there is no op {other:?}: use segment-create, segment-remove, vm-add, vm-remove"
            ))),
        }
        .map(Some)
    }

    /// Lets a process make the segment's file, unless the file exists.
    fn segment_create(
        &mut self,
        client: ClientId,
        request: u32,
        name: String,
        spec: SegmentSpec,
    ) -> Result<Option<Value>, Refusal> {
        if let Some(declared) = checked(&name).ok().and_then(|name| self.out_of_service.get(&name)) {
            let declared = declared.0.clone();
            return self.segment_again(declared, &name, &spec).map(Some);
        }
        let segment = self.new_segment(&name, &spec)?;
        let place = format!("segment {name}");
        // The slices of a file follow each other in it, so this file grows here.
        if self.prepare_making(&segment, &place)? || segment.shared_file.is_some() {
            return self.segment_declare(&name, spec).map(Some);
        }
        let wanted_by = WantedBy::Client { client, request, name, spec: Box::new(spec) };
        self.begin_making(PendingSegment { segment, wanted_by }, &place)?;
        Ok(None)
    }

    /// Tries again at once to open a segment that is declared but out of service.
    fn segment_again(
        &mut self,
        declared: config::Segment,
        name: &str,
        spec: &SegmentSpec,
    ) -> Result<Value, Refusal> {
        let place = format!("segment {name}");
        let requested = self.config.segment(name, spec, &place)?;
        let what = |s: &config::Segment| (s.requested, s.memory, s.members.clone(), s.readers.clone());
        if what(&requested) != what(&declared) {
            let text = format!(
                "{place} is declared already, with another size, kind or members, and is out of service: request the same, or remove it first"
            );
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if !self.journal.takes() {
            return Err(unrecorded());
        }
        if !self.retry_segment(&declared.name) {
            let why = self.segments.why_broken(&declared.name).unwrap_or("its file cannot be used");
            return Err(invalid(why.to_owned()));
        }
        Ok(added(name, &declared))
    }

    /// Checks a segment that is to be added.
    fn new_segment(&self, name: &str, spec: &SegmentSpec) -> Result<config::Segment, Refusal> {
        let place = format!("segment {name}");
        let segment = self.config.segment(name, spec, &place)?;
        if let Some(doubt) = doubt_of_segment(&segment, &place) {
            return Err(doubt.into());
        }
        if self.pending_segments.contains(&segment.name) {
            let text = format!("{place} is being made: wait for it, or choose another name");
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if self.broker.books().segments.contains_key(&segment.name) {
            return Err(Refusal::new(
                ErrorCode::IN_USE,
                format!("{place} is there already: choose another name"),
            ));
        }
        let mut members = BTreeSet::new();
        for member in segment.sharers() {
            let Some(found) = self.broker.books().member_named(member).filter(|m| !m.retired) else {
                let text = format!("{place}: there is no VM {member}: declare it first");
                return Err(Refusal::new(ErrorCode::NOT_FOUND, text));
            };
            members.insert(found.number);
        }
        for member in &members {
            let n = self.broker.books().segments.values().filter(|s| s.members.contains(member)).count();
            if *member != HOST_MEMBER && n >= MAX_SEGMENTS_PER_MEMBER {
                let text = format!(
                    "{place}: member {member} has {n} segments, which is the limit: share fewer and larger ones"
                );
                return Err(Refusal::new(ErrorCode::LIMIT, text));
            }
        }
        Ok(segment)
    }

    /// Adds a segment.
    pub(super) fn segment_declare(&mut self, name: &str, spec: SegmentSpec) -> Result<Value, Refusal> {
        // Its members may have been removed while the file was made.
        let segment = self.new_segment(name, &spec)?;
        if !self.journal.takes() {
            return Err(unrecorded());
        }
        let place = format!("segment {name}");
        self.declare_segment(&segment, Some(spec), &place, false)
            .map_err(|error| invalid(format!("{error:#}")))?;
        self.tell_members(&segment.name);
        Ok(added(name, &segment))
    }

    fn segment_remove(&mut self, text: &str, force: bool, _: NoKeys) -> Result<Value, Refusal> {
        let name = checked(text)?;
        let books = self.broker.books();
        let Some(segment) = books.segments.get(&name) else {
            return Err(Refusal::new(ErrorCode::NOT_FOUND, format!("there is no segment {text}")));
        };
        if segment.runtime.is_none() {
            let file = self.config.file.display();
            let text = format!(
                "segment {text} is declared in {file}, or a VM's home: remove it there, or remove the VM"
            );
            return Err(invalid(text));
        }
        let endpoints = books.endpoints.values().filter(|e| e.segment == name).count();
        let mut running =
            segment.members.iter().filter_map(|n| books.members.get(n)).filter(|m| m.qemu.is_some());
        if !force && endpoints > 0 {
            let text = format!("{endpoints} programs are attached to segment {text}: end them, or use force");
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if !force && let Some(vm) = running.next() {
            let text =
                format!("VM {} runs and may have segment {text} as a device: stop it, or use force", vm.name);
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        self.remove_file_of(&name)?;
        self.end_segment(&name);
        Ok(json!({}))
    }

    /// Removes the file of a segment that is about to be removed. As long as the file is there, the segment stays in the books, so that
    /// nobody else gets the memory under its name.
    fn remove_file_of(&mut self, name: &Name) -> Result<(), Refusal> {
        match self.segments.remove_file(name) {
            Ok(true) => Ok(()),
            Ok(false) => {
                let text = format!(
                    "the file of segment {name} cannot be removed yet, because a program holds its lock, or that of its folder: end the \
                     programs of other users that use this file system, then remove the segment again"
                );
                Err(Refusal::new(ErrorCode::IN_USE, text))
            }
            Err(error) => {
                warn!(segment = %name, %error, "its file cannot be removed");
                Ok(())
            }
        }
    }

    fn vm_add(&mut self, name: &str, spec: VmSpec) -> Result<Value, Refusal> {
        let place = format!("VM {name}");
        let (vm, home) = self.config.vm(name, &spec, &place)?;
        if let Some(doubt) = doubt_of_vm(&vm, &place) {
            return Err(doubt.into());
        }
        if self.broker.books().member_named(&vm.name).is_some_and(|m| !m.retired) {
            return Err(Refusal::new(
                ErrorCode::IN_USE,
                format!("{place} is there already: choose another name"),
            ));
        }
        if let Some(home) = &home
            && self.broker.books().segments.contains_key(&home.name)
        {
            let text = format!("{place}: its home would be segment {}, which is there already", home.name);
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        let number = self.choose_number(&vm, &BTreeSet::new(), &place)?;
        let declared = self.declare_vm(&vm, number, Some(spec), &place, false).and_then(|()| match &home {
            Some(home) => self.declare_segment(home, None, &place, false).or_else(|error| {
                // If its file is being made, which may take long, it will be in service later.
                let is_making = self.segments.is_making(&home.path);
                if is_making { self.declare_segment(home, None, &place, true) } else { Err(error) }
            }),
            None => Ok(()),
        });
        if let Err(error) = declared {
            self.retire_vm(number);
            return Err(invalid(format!("{error:#}")));
        }
        Ok(json!({ "vm": {
            "name": name,
            "number": number,
            "socket": self.config.vm_socket(&vm.name),
            "vectors": self.config.vectors,
        }}))
    }

    fn vm_remove(&mut self, text: &str, _: NoKeys) -> Result<Value, Refusal> {
        let name = checked(text)?;
        let books = self.broker.books();
        let Some(member) = books.member_named(&name).filter(|m| !m.retired && m.number != HOST_MEMBER) else {
            return Err(Refusal::new(ErrorCode::NOT_FOUND, format!("there is no VM {text}")));
        };
        if member.runtime.is_none() {
            return Err(invalid(format!(
                "VM {text} is declared in {}: remove it there",
                self.config.file.display()
            )));
        }
        if let Some(qemu) = &member.qemu {
            let text = format!("VM {text} runs (QEMU is process {}): stop it first", qemu.process.pid);
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        let number = member.number;
        let home = checked(&format!("home-{text}")).ok();
        let mut shared =
            books.segments.values().filter(|s| s.members.contains(&number) && Some(s.name) != home);
        if let Some(segment) = shared.next() {
            let text = format!("VM {text} is a member of segment {}: remove that first", segment.name);
            return Err(Refusal::new(ErrorCode::IN_USE, text));
        }
        if let Some(home) = home.filter(|home| books.segments.contains_key(home)) {
            self.remove_file_of(&home)?;
            self.end_segment(&home);
        }
        self.retire_vm(number);
        Ok(json!({}))
    }
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct NoKeys {}

fn text_key(keys: &mut Map<String, Value>, key: &str) -> Result<String, Refusal> {
    match keys.remove(key) {
        Some(Value::String(text)) => Ok(text),
        _ => Err(invalid(format!("`{key}` is missing, or not a text"))),
    }
}

fn spec<T: DeserializeOwned>(keys: Map<String, Value>) -> Result<T, Refusal> {
    serde_json::from_value(Value::Object(keys)).map_err(invalid)
}

fn checked(text: &str) -> Result<Name, Refusal> {
    Name::new(text).map_err(|error| invalid(format!("{text:?}: {error}")))
}

/// Returns the answer for a segment that was added.
fn added(name: &str, segment: &config::Segment) -> Value {
    json!({ "segment": {
        "name": name,
        "size": segment.size,
        "wished": segment.requested,
        "path": segment.path,
        "members": segment.members.iter().map(Name::as_str).collect::<Vec<_>>(),
        "readers": segment.readers.iter().map(Name::as_str).collect::<Vec<_>>(),
        "memory": segment.memory,
        "page": segment.page,
    }})
}
