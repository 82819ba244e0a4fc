//! x
use planner::restrict::Restrictions;
use planner::search::{Task, search};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let spec = models::model::shipped(&a[1]).and_then(Result::ok).expect("m");
    let machine = models::cluster::shipped(&a[3]).and_then(Result::ok).expect("c");
    let r = Restrictions::parse(&a[5.min(a.len())..].to_vec()).expect("r");
    let mut t = Task::new(&spec, &machine, a[2].parse().unwrap(), &r);
    t.cutoff_s = a[4].parse().unwrap();
    let o = search(&t, &mut |_, _| {});
    println!("{:?}", o.proof);
    if let Some(f) = &o.best {
        println!("{} {:?}", f.priced.iteration_s, f.decisions);
    }
    let hwm = std::fs::read_to_string("/proc/self/status").unwrap();
    println!("{}", hwm.lines().find(|l| l.starts_with("VmHWM")).unwrap());
}
