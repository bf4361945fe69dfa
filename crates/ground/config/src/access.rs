//! File permissions and owners in a configuration.

use crate::Problem;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::convert::Infallible;
use std::fmt::Display;
use std::str::FromStr;

/// Permission bits, written in octal as for `chmod`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Mode {
    /// Returns what nobody can mean about the mode of a socket. If nobody may connect to it, there is this `consequence`.
    pub fn doubt_of_socket(self, place: &str, consequence: &str) -> Option<Problem> {
        if self.0 & 0o222 == 0 {
            let what = format!("{:04o}: {consequence}, because nobody may write to the socket", self.0);
            return Some(Problem::new(place, what, "write 0660, for example"));
        }
        self.doubt(place)
    }

    /// Returns what nobody can mean about the mode of a socket, or of a file that is no program.
    pub fn doubt(self, place: &str) -> Option<Problem> {
        (self.0 & !0o666 != 0).then(|| {
            let what = format!("{:04o}: nobody executes it, and it has no other special bits", self.0);
            Problem::new(place, what, format!("write {:04o}", self.0 & 0o666))
        })
    }
}

impl FromStr for Mode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err(format!("{text:?} is not a file mode: write it in octal, like \"0660\"")),
        }
    }
}

impl Serialize for Mode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:04o}", self.0))
    }
}

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// A user or group, by name or number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Account {
    /// The user or group number.
    Number(u32),
    /// The user or group name.
    Name(String),
}

impl FromStr for Account {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(text.parse().map_or_else(|_| Self::Name(text.into()), Self::Number))
    }
}

impl Account {
    /// Returns the number of this user. `place` says where the configuration names it, for the error.
    pub fn user(&self, place: impl Display) -> Result<u32, Problem> {
        let find = |name: &str| nix::unistd::User::from_name(name).map(|u| u.map(|u| u.uid.as_raw()));
        self.look_up(place, "user", find)
    }

    /// Returns the number of this group. `place` says where the configuration names it, for the error.
    pub fn group(&self, place: impl Display) -> Result<u32, Problem> {
        let find = |name: &str| nix::unistd::Group::from_name(name).map(|g| g.map(|g| g.gid.as_raw()));
        self.look_up(place, "group", find)
    }

    /// Returns the number of the user's own group, if the system knows the user.
    pub fn own_group(&self) -> Option<u32> {
        let known = match self {
            Self::Number(number) => nix::unistd::User::from_uid((*number).into()),
            Self::Name(name) => nix::unistd::User::from_name(name),
        };
        known.ok().flatten().map(|user| user.gid.as_raw())
    }

    fn look_up(
        &self,
        place: impl Display,
        kind: &str,
        find: impl Fn(&str) -> nix::Result<Option<u32>>,
    ) -> Result<u32, Problem> {
        let name = match self {
            Self::Number(number) => return Ok(*number),
            Self::Name(name) => name,
        };
        match find(name) {
            Ok(Some(number)) => Ok(number),
            Ok(None) => {
                let fix = format!("create the {kind} or write its number");
                Err(Problem::new(place, format!("there is no {kind} {name:?}"), fix))
            }
            Err(errno) => {
                let what = format!("the {kind} {name:?} cannot be looked up: {errno}");
                Err(Problem::new(place, what, format!("write the {kind}'s number")))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!("0666".parse(), Ok(Mode(0o666)));
        for bad in ["", "8", "1777", "rw"] {
            assert!(bad.parse::<Mode>().unwrap_err().contains("0660"), "{bad}");
        }
    }

    #[test]
    fn a_mode_that_nobody_can_mean_is_told() {
        let doubt = |mode| Mode(mode).doubt_of_socket("m", "all wait").map(|problem| problem.to_string());
        assert_eq!((doubt(0o660), doubt(0o600), doubt(0o666)), (None, None, None));
        assert!(doubt(0o000).unwrap().starts_with("m: 0000: all wait, because nobody may write"));
        assert!(doubt(0o444).unwrap().contains("all wait"));
        assert!(doubt(0o777).unwrap().ends_with("write 0666"));
    }

    #[test]
    fn accounts_are_names_or_numbers() {
        let root: Account = "root".parse().unwrap();
        assert_eq!((root.user("user"), root.group("group"), root.own_group()), (Ok(0), Ok(0), Some(0)));
        assert_eq!("7".parse(), Ok(Account::Number(7)));
        assert_eq!(Account::Number(4_000_000_000).user("user"), Ok(4_000_000_000));
        assert_eq!(Account::Number(4_000_000_000).own_group(), None);
    }

    #[test]
    fn the_error_for_an_unknown_account_names_it() {
        let nobody = Account::Name("no-such-account-here".into());
        let problem = nobody.user("f.toml: owner").unwrap_err().to_string();
        assert_eq!(
            problem,
            "f.toml: owner: there is no user \"no-such-account-here\"; create the user or write its number"
        );
        assert!(nobody.group("group").unwrap_err().what.starts_with("there is no group"));
    }
}
