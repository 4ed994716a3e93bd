package sql

// DoctorFacts returns the query for what posthaste doctor wants to know of the server. It needs no schema.
func DoctorFacts() string { return query("doctor_facts") }

// DoctorPublication returns the query whether the publication $1 announces inserts into the outbox.
func DoctorPublication() string { return query("doctor_publication") }

// DoctorRights returns the query for the rights on tables that the role lacks, "" for none; whether it may make the
// history's partitions, make the publication, and see the transactions of others; and the tables whose row security hides
// rows from it, "" for none.
func DoctorRights() string { return query("doctor_rights") }

// DoctorSlot returns the query for the slot named $1.
func DoctorSlot() string { return query("doctor_slot") }

// DoctorCapacity returns the query for what grows: the WAL written and the seconds it took, the sizes of the outbox and of
// the history, and the day (YYYYMMDD, "" for none) of the oldest history partition that holds anything.
func DoctorCapacity() string { return query("doctor_capacity") }
