--[[
New tasks of one shape, in few commands. `plain.lua` tells what is plain. Where an id is known, that row takes the long way.
]]

local SOME = 1000 -- rows that are looked up together

-- The fields of a new job, beside its id and payload, `o`, those of its shape and those that only some tasks have. `created` may
-- lie before now: that of a task of a run is the commit, that of a task from another store what it was there.
function store.new_fields(created)
  return {
    'state', 'wait', 'attempt', '0', 'created_ms', created, 'queued_ms', created, 'updated_ms', NOW,
    'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
  }
end

local function expand(op, i)
  local fields = append({'id', op.rows[i], 'payload', op.rows[i + 1]}, op.fields)
  return {
    kind = 'enqueue', queue = op.queue, id = op.rows[i], name = op.name, fields = fields, lease = op.lease, ttl = op.ttl,
    fingerprint = op.rows[i + 2], on_conflict = op.on_conflict, options = op.options,
    data = '{"payload_bytes":' .. (op.empty and 0 or #op.rows[i + 1]) .. '}',
  }
end

local function insert(q, op, common, i)
  machine.promote(q, PROMOTE_LIMIT)
  q.enqueued, q.changed, ready_queues[q.name] = true, true, true
  local id, payload, seq = op.rows[i], op.rows[i + 1], digits(next_seq(q))
  local origin = store.origin(NOW, seq, op.ttl, op.name, op.rows[i + 2], op.options)
  call('HSET', q.job .. id, 'id', id, 'payload', payload, 'o', origin, unpack(common))
  lanes.push(q.base .. 'wait', id)
  add(q, 'idx:wait', NOW, id)
  add(q, 'o:tasks', seq, id)
  cache[slot(q, id)], q.ahead[id] = nil, true
  if whereabouts[id] == false then whereabouts[id] = nil end
  if request.events then
    local data = '{"payload_bytes":' .. TEXT[op.empty and 0 or #payload] .. '}'
    log.add(q, 'enqueued', id, op.name, false, 0, false, now, now, CODE.wait, data)
  end
end

local staging

-- The hashes of staged tasks, of all queues that have any.
local function all_staged(names)
  if not staging then
    staging = {}
    local keys = {}
    for i, base in ipairs(names) do keys[i] = base .. 'o:staged' end
    if exist(keys) then
      for _, key in ipairs(keys) do
        if call('EXISTS', key) == 1 then staging[#staging + 1] = key end
      end
    end
  end
  return staging
end

-- Whether none of these ids is in the store or comes twice, in few questions.
function store.all_new(q, ids)
  local names, own, keys, seen, unsure, n = store.all_bases(q), {q.base}, {}, {}, ids, 0
  for _, id in ipairs(ids) do
    if seen[id] or type(whereabouts[id]) == 'table' then return false end
    seen[id] = true
  end
  if next(whereabouts) then
    unsure = {}
    for _, id in ipairs(ids) do
      if whereabouts[id] ~= false then unsure[#unsure + 1] = id end
    end
  end
  local many = 2 * #unsure * #names > LOOKUPS
  if many then
    machine.need('many')
    store.look(unsure)
  end
  for _, id in ipairs(ids) do
    if many and whereabouts[id] ~= false then return false end
    local asked = whereabouts[id] == false and own or names
    for i = 1, #asked do
      keys[n + 1], keys[n + 2] = asked[i] .. 'job:' .. id, asked[i] .. 'o:end:' .. id
      n = n + 2
    end
  end
  if exist(keys) then return false end
  for _, key in ipairs(#unsure > 0 and not many and all_staged(names) or {}) do
    for i = 1, #ids, PART do
      local last = math.min(i + PART - 1, #ids)
      local found = call('HMGET', key, unpack(ids, i, last))
      for n = 1, last - i + 1 do
        if found[n] then return false end
      end
    end
  end
  return true
end

local function is_known(q, id)
  return type(whereabouts[id]) == 'table' or store.find(q, id) or store.occupied[slot(q, id)]
end

-- Rows from one number to another, each a transaction of its own.
local function publish(q, op, common, from, to, answers)
  local ids = {}
  for i = from, to, 3 do ids[#ids + 1] = op.rows[i] end
  local fresh = store.all_new(q, ids)
  local before = spent
  for i = from, to, 3 do
    if spent - before > BUDGET then break end
    if not fresh and is_known(q, op.rows[i]) then
      answers[#answers + 1] = machine.transaction({expand(op, i)})
    else
      insert(q, op, common, i)
      answers[#answers + 1] = 1
    end
  end
end

-- All rows as one transaction.
local function publish_together(q, op, common)
  local rows, ids = op.rows, {}
  for i = 1, #rows, 3 do ids[#ids + 1] = rows[i] end
  local plain = store.all_new(q, ids)
  if not plain then
    plain = true
    for _, id in ipairs(ids) do plain = plain and not is_known(q, id) end
  end
  if not plain then
    local ops = {}
    for i = 1, #rows, 3 do ops[#ops + 1] = expand(op, i) end
    return machine.transaction(ops)
  end
  for i = 1, #rows, 3 do insert(q, op, common, i) end
  return {}
end

-- Tasks that differ in id, payload and fingerprint only, which `rows` holds. Together they are one transaction, or each is one.
-- Of those, a call answers only for as many as its budget allows: the caller sends the others anew.
function alike.enqueues(op)
  local q, answers, rows = queue(op.queue), {}, op.rows
  local common = append(store.new_fields(NOW), op.fields)
  if op.together then return publish_together(q, op, common) end
  for from = 1, #rows, 3 * SOME do
    if from > 1 and spent > BUDGET then break end
    publish(q, op, common, from, math.min(from + 3 * SOME - 1, #rows), answers)
  end
  return answers
end
