"""The stories: how one opens, what goes wrong, who helps, how it ends.

Every story has a hero who keeps name and pronouns throughout. A plot is a row of symbols; each symbol has several
sentences that may stand there, and none of them needs another to make sense. The variables are bound in the order
of reading; see `grammar` for the notation.
"""

from collections.abc import Mapping, Sequence

from . import lexicon
from .grammar import Word

DOMAINS: Mapping[str, Sequence[Word]] = {
    "hero": lexicon.NAMES,
    "friend": lexicon.NAMES,
    "newcomer": lexicon.NAMES,
    "helper": lexicon.RELATIVES,
    "kind": lexicon.KINDS,
    "trait": lexicon.TRAITS,
    "home": lexicon.HOMES,
    "hobby": lexicon.HOBBIES,
    "time": lexicon.TIMES,
    "colour": lexicon.COLOURS,
    "toy": lexicon.TOYS,
    "pastime": lexicon.HOBBIES,
    "search": lexicon.SEARCHES,
    "trail": lexicon.TRAILS,
    "yard": lexicon.YARDS,
    "food": lexicon.FOODS,
    "spot": lexicon.SPOTS,
    "rescue": lexicon.RESCUES,
    "young": lexicon.YOUNG_ANIMALS,
    "gift": lexicon.GIFTS,
    "noise": lexicon.NOISES,
    "plant": lexicon.PLANTS,
    "skill": lexicon.SKILLS,
    "find": lexicon.FINDS,
    "owner": lexicon.OWNERS,
    "mend": lexicon.MENDS,
    "obstacle": lexicon.OBSTACLES,
    "game": lexicon.GAMES,
    "feeling": lexicon.FEELINGS,
}

DISTINCT = (frozenset({"hero", "friend", "newcomer"}),)

_FRAME: Mapping[str, Sequence[str]] = {
    "story": ["<opening><plot>", "<animal_opening><plot>"],
    "opening": [
        "Once upon a time there was {trait.a} {hero.child} named {hero}. <home_later>",
        "Once upon a time, there was a little {hero.child} named {hero}. <home_later>",
        "Once upon a time, in {home.a}, there lived {trait.a} {hero.child} called {hero}. <character>",
        "Once upon a time there lived {trait.a} {hero.child} whose name was {hero}. <home_later>",
        "There was once {trait.a} little {hero.child} named {hero}. <home_later>",
        "In {home.a} there lived a {hero.child} called {hero}. <character>",
        "Long ago, {trait.a} {hero.child} named {hero} lived in {home.a}. <character>",
        "{hero} was {trait.a} {hero.child} who lived in {home.a}. <character>",
    ],
    "animal_opening": [
        "Once upon a time there was {trait.a} {kind} named {hero}. <home_later>",
        "Once upon a time, there was a little {kind} named {hero}. <home_later>",
        "Once upon a time, in {home.a}, there lived {kind.a} called {hero}. <character>",
        "Once upon a time there lived {trait.a} little {kind} whose name was {hero}. <home_later>",
        "There was once a little {kind} named {hero}. <home_later>",
        "{hero} was {trait.a} {kind} who lived in {home.a}. <character>",
    ],
    "home_later": [
        "{hero.He} lived with {hero.his} {helper} in {home.a}. <character>",
        "{hero.His} home was {home.a}. <character>",
        "{hero} lived in {home.a} together with {hero.his} {helper}. <character>",
        "<character>",
    ],
    "character": [
        "{hero} loved {hobby}.",
        "More than anything else, {hero} loved {hobby}.",
        "Every day {hero.he} spent hours {hobby}.",
        "{hero.He} was happy when {hero.he} was {hobby}.",
        "Everyone liked {hero}, because {hero.he} always had a smile.",
        "All the neighbours knew {hero.him} and waved when {hero.he} went by.",
        "{hero.He} had a warm heart and a head full of questions.",
        "{hero.He} was never bored, because {hero.he} liked {hobby} so much.",
        "{hero.He} asked a hundred questions a day.",
    ],
    "plot": [
        "\n\n<lost>",
        "\n\n<stuck>",
        "\n\n<broken>",
        "\n\n<newcomer>",
        "\n\n<far_from_home>",
        "\n\n<present>",
        "\n\n<noise_at_night>",
        "\n\n<garden>",
        "\n\n<learning>",
        "\n\n<honest_finder>",
        "\n\n<journey>",
        "\n\n<rainy_day>",
    ],
    "sad": [
        "{hero} felt very {feeling}.",
        "This made {hero} {feeling}.",
        "{hero.He} was {feeling} and did not know what to do.",
        "{hero.He} sat down and felt {feeling}.",
        "A tear ran down {hero.his} cheek.",
        "{hero.He} wanted to cry, but {hero.he} took a deep breath.",
    ],
    "friend_comes": [
        "Just then {friend} came along.",
        "After a while {friend} walked by.",
        "Then {hero.his} friend {friend} heard about it.",
        "Soon {friend} came to see what was going on.",
        "Luckily {friend} was not far away.",
        "At that moment {friend} came around the corner.",
    ],
    "friend_asks": [
        '"What is the matter?" asked {friend}.',
        '"Why do you look so sad?" {friend} asked.',
        '"Can I help you?" asked {friend}.',
        '"What happened?" {friend} wanted to know.',
    ],
    "hero_tells": [
        "{hero} told {friend.him} everything.",
        "{hero} explained what had happened.",
        "So {hero} told {friend.him} the whole story.",
        '"I need a friend right now," said {hero}.',
    ],
    "friend_offers": [
        '"Do not worry," said {friend}. "We will do it together."',
        '"I have an idea," said {friend}.',
        '"Two are better than one," said {friend} with a smile.',
        '"Let us try again," {friend} said. "I will help you."',
        "{friend} thought for a moment and took {hero.him} by the hand.",
    ],
    "joy": [
        "{hero} laughed with joy.",
        "{hero} jumped up and down with joy.",
        "A big smile came over {hero.his} face.",
        "{hero} was so happy that {hero.he} danced in a circle.",
        "{hero.His} heart felt light again.",
        "{hero} had never been so happy.",
    ],
    "thanks": [
        '"Thank you, {friend}!" said {hero}.',
        '"You are a true friend," {hero} said to {friend}.',
        "{hero} thanked {friend} and gave {friend.him} a big hug.",
        '"I could not have done it without you," said {hero}.',
    ],
    "close": [
        "That night {hero} slept well and had sweet dreams.",
        "And they talked about it for a long time.",
        "From that day on, they were the best of friends.",
        "In the evening they sat by the fire and laughed about it.",
        "When the stars came out, {hero} went home with a happy heart.",
        "And from then on, {hero} was never afraid to ask for help.",
        "It was a day that {hero} would never forget.",
        "And if you pass by on a quiet day, you may still hear them laugh.",
    ],
    "close_alone": [
        "That night {hero} slept well and had sweet dreams.",
        "In the evening {hero} told the story by the fire.",
        "When the stars came out, {hero} fell asleep with a smile.",
        "It was a day that {hero} would never forget.",
        "And {hero} lived happily for many years.",
        "After that, {hero} was a little braver than before.",
    ],
}

_LOST: Mapping[str, Sequence[str]] = {
    "lost": [
        "<lost_begin> <lost_gone> <sad> <lost_search> <friend_comes> <friend_asks> <hero_tells> <friend_offers> "
        "<lost_found>\n\n<joy> <thanks> <lost_end> <close>",
    ],
    "lost_begin": [
        "{time.Plain} {hero} wanted to play with {hero.his} {colour} {toy}.",
        "{hero} had {colour.a} {toy} that {hero.he} loved very much.",
        "{hero.His} {helper} had given {hero.him} {colour.a} {toy}, and {hero.he} took it everywhere.",
        "{time.Plain} {hero} looked for {hero.his} favourite toy, {colour.a} {toy}.",
    ],
    "lost_gone": [
        "But the {toy} was gone.",
        "But {hero.he} could not find the {toy} anywhere.",
        "But when {hero.he} reached for the {toy}, it was not there.",
        "But then {hero.he} saw that the {toy} had disappeared.",
    ],
    "lost_search": [
        "{hero.He} looked {search}, but there was nothing. {hero.He} looked {search.second}, and there was nothing "
        "there either.",
        "First {hero.he} searched {search}. Then {hero.he} searched {search.second}. The {toy} was in neither place.",
        "{hero.He} searched {search} and {search.second}, but it was no use.",
        '"Maybe it is {search}," {hero.he} thought. But {search} there was only dust.',
    ],
    "lost_found": [
        "Together they looked {search.last}, and there was the {colour} {toy}!",
        "They walked back the way {hero} had come, and {search.last} they found the {colour} {toy}.",
        '"Look!" said {friend}. "There is something {colour} {search.last}." It was the {toy}.',
        "They searched for an hour, until {friend} saw the {colour} {toy} {search.last}.",
    ],
    "lost_end": [
        "From then on, {hero} always put the {toy} back in its box.",
        "Then they played with the {toy} until it grew dark.",
        "{hero} let {friend} play with the {toy} first.",
        "The {toy} had a little dust on it, but it was as good as new.",
    ],
}

_STUCK: Mapping[str, Sequence[str]] = {
    "stuck": [
        "<stuck_hear> <stuck_see> <stuck_try> <stuck_helper> <stuck_free>\n\n<stuck_happy> <stuck_end> <close_alone>",
        "<stuck_hear> <stuck_see> <stuck_try> <friend_comes> <friend_offers> <stuck_fetch> <stuck_free>\n\n"
        "<stuck_happy> <thanks> <close>",
    ],
    "stuck_hear": [
        '{time.Plain} {hero} was on the way to {spot} when {hero.he} heard a small voice. "{rescue.cry}! '
        '{rescue.cry}!" it went.',
        '{time.Plain} {hero} was walking to {spot}. Suddenly there was a cry. "{rescue.cry}! {rescue.cry}!"',
        'On the road to {spot}, {hero} stopped and listened. "{rescue.cry}," said somebody very softly.',
    ],
    "stuck_see": [
        "It was a little {rescue}, and it was stuck {rescue.trapped}.",
        "There, {rescue.trapped}, sat a frightened {rescue}.",
        "A small {rescue} was {rescue.trapped} and could not get away.",
        "{hero.He} looked around and saw a tiny {rescue} {rescue.trapped}.",
    ],
    "stuck_try": [
        '"Poor thing," said {hero}. {hero.He} tried to reach the {rescue}, but it was too far away.',
        "{hero} stretched out {hero.his} arms as far as {hero.he} could. It was not enough.",
        '"Do not be afraid," {hero} said. {hero.He} tried once, and {hero.he} tried twice, but it did not work.',
        "{hero} tried to help, but {hero.he} was too small to do it alone.",
    ],
    "stuck_helper": [
        "So {hero.he} ran home and asked {hero.his} {helper} for help. {hero.His} {helper} came with {rescue.tool}.",
        "Then {hero.he} called {hero.his} {helper}, who brought {rescue.tool}.",
        '"Wait here," {hero.he} said, and ran to {hero.his} {helper}. Soon they came back with {rescue.tool}.',
    ],
    "stuck_fetch": [
        "They ran to the nearest house and borrowed {rescue.tool}.",
        "{friend} ran home and came back with {rescue.tool}.",
        "In {friend.his} shed they found {rescue.tool}.",
    ],
    "stuck_free": [
        "They {rescue.deed}.",
        "With {rescue.tool} it was easy. They {rescue.deed}.",
        "It took a long time, but in the end they {rescue.deed}.",
        "Very slowly and very gently, they {rescue.deed}.",
    ],
    "stuck_happy": [
        "The {rescue} was safe at last.",
        "The {rescue} shook itself and looked at {hero} with bright eyes.",
        'The {rescue} was free. "{rescue.cry}!" it said, and that meant thank you.',
        "The little {rescue} pressed its nose against {hero.his} hand.",
    ],
    "stuck_end": [
        '"Well done," said {hero.his} {helper}. "You have a kind heart."',
        "{hero.His} {helper} was very proud of {hero.him}.",
        "After that, the {rescue} came to visit {hero} every day.",
        "{hero} gave the {rescue} some water and took it home.",
    ],
}

_BROKEN: Mapping[str, Sequence[str]] = {
    "broken": [
        "<broken_begin> <broken_crack> <sad> <friend_comes> <friend_asks> <hero_tells> <broken_mend> <broken_work>"
        "\n\n<joy> <thanks> <broken_end> <close>",
        "<broken_begin> <broken_crack> <sad> <broken_helper> <broken_work>\n\n<joy> <broken_end> <close_alone>",
    ],
    "broken_begin": [
        "{time.Plain} {hero} was playing with {hero.his} {colour} {toy}.",
        "{time.Plain} {hero} took {hero.his} new {colour} {toy} to {spot}.",
        "{time.Plain} {hero} ran outside with {colour.a} {toy} under {hero.his} arm.",
    ],
    "broken_crack": [
        "But {hero.he} tripped over a root, and the {toy} broke in two.",
        "Then the {toy} fell to the ground with a loud crack.",
        "But {hero.he} pulled too hard, and a piece of the {toy} came off.",
        "Then a big dog jumped up, and the {toy} was broken.",
    ],
    "broken_mend": [
        '"We can mend it," said {friend}, and {friend.he} fetched {mend}.',
        '"All we need is {mend}," said {friend}.',
        "{friend} had an idea. {friend.He} ran home and brought {mend}.",
    ],
    "broken_helper": [
        'But {hero.his} {helper} was not angry. "Things can break, and things can be mended," {helper.he} said, and '
        "took out {mend}.",
        '{hero.He} showed the pieces to {hero.his} {helper}. "Let me see," {helper.he} said. "All we need is {mend}."',
        "{hero.His} {helper} smiled and opened a drawer. In it was {mend}.",
    ],
    "broken_work": [
        "They worked all afternoon, piece by piece.",
        "They sat down at the table and worked slowly and carefully.",
        "Little by little, the {toy} became whole again.",
        "It was not easy, but they did not give up.",
    ],
    "broken_end": [
        "The {toy} looked even better than before.",
        "There was a small line where it had been broken, and {hero} liked it that way.",
        "{hero} held the {colour} {toy} up to the light and smiled.",
        "Now {hero.he} knew how to mend things.",
    ],
}

_NEWCOMER: Mapping[str, Sequence[str]] = {
    "newcomer": [
        "<new_see> <new_alone> <new_think> <new_share> <new_talk> <new_play>\n\n<new_end> <new_lesson> <new_close>",
    ],
    "new_see": [
        "{time.Plain} {hero} saw somebody new at {spot}. It was a {newcomer.child} named {newcomer}.",
        "{time.Plain} a {newcomer.child} called {newcomer} came to {spot} for the first time.",
        "{time.Plain} a new family moved into the house next door. They had a {newcomer.child} named {newcomer}.",
    ],
    "new_alone": [
        "{newcomer} sat all alone and looked at {newcomer.his} shoes.",
        "{newcomer} did not know anyone and stood quietly beside a tree.",
        "Nobody played with {newcomer}, and {newcomer.he} looked very {feeling}.",
        "{newcomer} wanted to play too, but {newcomer.he} was too shy to ask.",
    ],
    "new_think": [
        '"I know how that feels," thought {hero}.',
        "{hero} remembered how it felt to be alone.",
        '"I must do something," {hero} said to {hero.himself}.',
        "{hero} was a little shy too, but {hero.he} walked over.",
    ],
    "new_share": [
        "{hero.He} had {food.a} in {hero.his} bag. {hero.He} broke it in two and gave half to {newcomer}.",
        '"Hello, I am {hero}," {hero.he} said. "Would you like {food.a}?"',
        '{hero.He} sat down next to {newcomer}. "I have {food.a}," {hero.he} said. "We can share."',
    ],
    "new_talk": [
        '"Thank you," said {newcomer} in a small voice.',
        '{newcomer} looked up and smiled. "I would like that," {newcomer.he} said.',
        '"You are kind," {newcomer} said. "I do not know anybody here."',
    ],
    "new_play": [
        "They ate together, and then they played hide and seek.",
        "Soon they were {pastime} together.",
        "Then {hero} showed {newcomer} the best places to play.",
        "After that, {newcomer} taught {hero} a new song.",
        "They talked and talked until the sun went down.",
    ],
    "new_end": [
        "The next day {newcomer} came back with a big smile.",
        "The next morning {newcomer} was waiting at the door with {colour.a} {toy}.",
        "When it was time to go home, they were friends.",
    ],
    "new_close": [
        "From that day on, they were the best of friends.",
        "From then on, {hero} and {newcomer} played together every day.",
        "And if you pass by on a quiet day, you may still hear them laugh.",
        "That night {hero} went to bed with a happy heart.",
        "And they never forgot how they had met.",
    ],
    "new_lesson": [
        "One kind word had been enough.",
        "{hero} had lost half of {hero.his} food and found a whole friend.",
        '"It was so easy to say hello," thought {hero}.',
        '"I am glad that you came to me," said {newcomer}.',
    ],
}

_FAR_FROM_HOME: Mapping[str, Sequence[str]] = {
    "far_from_home": [
        "<far_meet> <far_ask> <far_promise> <far_first> <far_second> <far_arrive>\n\n"
        "<far_mother> <far_end> <close_alone>",
    ],
    "far_meet": [
        "{time.Plain} {hero} found a little {young} near {spot}. It was lost.",
        '{time.Plain} {hero} met {young.a} on the road. "{young.sound}," it said sadly.',
        "{time.Plain}, not far from {spot}, {hero} saw a small {young} all by itself.",
    ],
    "far_ask": [
        '"Where is your mother?" asked {hero}. The {young} did not know.',
        '"Are you lost?" asked {hero}. The {young} nodded.',
        "The {young} shivered and looked very {feeling}.",
        'Big tears stood in its eyes. "I want to go home," it said.',
    ],
    "far_promise": [
        '"I will take you home," said {hero}.',
        '"Come with me," said {hero}. "We will find her."',
        "{hero} picked up the {young} and held it close.",
        '"Do not cry," {hero} said. "A mother always waits."',
    ],
    "far_first": [
        "First they looked {trail}, but no {young.mother} was there.",
        "They looked {trail}, but all they found was an old shoe.",
        'They asked a bird. "Try {trail}," it sang. But {trail} there was nobody.',
    ],
    "far_second": [
        "Then they looked {trail.second}, and there was nobody either.",
        "After that they asked {hero.his} {helper}, who pointed to the east.",
        'An old dog lay in the sun. "I saw {young.mother_a} go that way," it said.',
        "They walked on and on, and {hero} sang a song to keep the {young} happy.",
    ],
    "far_arrive": [
        "At last they came to {young.home}.",
        "In the end the road led to {young.home}.",
        "Then {hero} had an idea, and they went to {young.home}.",
    ],
    "far_mother": [
        'There stood a big {young.mother}. "{young.sound}!" she called, and the {young} ran to her.',
        "And there was the mother {young.mother}, who had been looking everywhere.",
        '"My baby!" cried the {young.mother}, and she held the little {young} close.',
    ],
    "far_end": [
        '"Thank you for bringing my child home," the {young.mother} said.',
        "{hero} was a little sad to say goodbye, but mostly {hero.he} was happy.",
        "The {young} waved until {hero} was out of sight.",
        '"Come and visit us," said the {young}, and {hero} often did.',
    ],
}

_PRESENT: Mapping[str, Sequence[str]] = {
    "present": [
        "<present_plan> <present_missing> <present_ask> <present_trade> <present_make>\n\n<present_give> "
        "<present_end> <close_alone>",
    ],
    "present_plan": [
        "It was the birthday of {hero.his} {helper}, and {hero} wanted to make {gift.a} for {helper.him}.",
        "{hero.His} {helper} was ill in bed. {hero} wanted to cheer {helper.him} up with {gift.a}.",
        "{time.Plain} {hero} decided to surprise {hero.his} {helper} with {gift.a}.",
    ],
    "present_missing": [
        "But there was one thing that {hero.he} did not have. {hero.He} had no {gift.needs}.",
        "{hero.He} looked in every cupboard, but {hero.he} had no {gift.needs} at all.",
        'Everything was ready, but one thing was missing. "I need {gift.needs}," said {hero}.',
    ],
    "present_ask": [
        "So {hero.he} went to {gift.seller} and asked for some {gift.needs}.",
        "So {hero.he} put on {hero.his} coat and walked to {gift.seller}.",
        '{hero.He} ran to {gift.seller}. "Please, may I have some {gift.needs}?" {hero.he} asked.',
    ],
    "present_trade": [
        '"You may have some {gift.needs} if you help me first," was the answer. So {hero} swept the floor.',
        '"What will you give me for it?" {hero} had only {colour.a} {toy}, and {hero.he} gave it away.',
        '"For such a good reason, take as much as you need," was the answer.',
        "{hero} helped to carry the heavy baskets, and then {hero.he} got a bag full of {gift.needs}.",
    ],
    "present_make": [
        "Back at home, {hero.he} {gift.maker} the {gift} all by {hero.himself}.",
        "{hero} hurried home and worked until the evening. In the end {hero.he} had {gift.maker} {gift.a}.",
        "{hero.His} friend {friend} helped, and together they {gift.maker} the {gift}.",
    ],
    "present_give": [
        "When {hero.his} {helper} saw the {gift}, {helper.he} could not believe it.",
        '"For me?" asked {hero.his} {helper}, and {helper.his} eyes were shining.',
        "{hero.His} {helper} took {hero.him} in {helper.his} arms.",
    ],
    "present_end": [
        '"This is the best present of all," {helper.he} said.',
        '"It is perfect," said {hero.his} {helper}.',
        "It was not perfect, but it was made with love.",
        "{hero} felt warm from head to toe.",
    ],
}

_NOISE: Mapping[str, Sequence[str]] = {
    "noise_at_night": [
        "<noise_bed> <noise_hear> <noise_fear> <noise_decide> <noise_walk> <noise_cause>\n\n<noise_laugh> <noise_end> "
        "<close_alone>",
    ],
    "noise_bed": [
        "One dark night {hero} lay in bed and could not sleep.",
        "One night, when the moon was hidden by clouds, {hero} woke up.",
        "It was late, and everyone else in the house was asleep. Only {hero} was awake.",
    ],
    "noise_hear": [
        "There was a strange {noise} {noise.where}.",
        "{hero.He} heard a soft {noise} {noise.where}.",
        '"What is that?" {hero.he} whispered. There was {noise.a} {noise.where}.',
    ],
    "noise_fear": [
        "{hero} pulled the blanket over {hero.his} head.",
        "{hero.His} heart beat fast.",
        '"It must be a monster," thought {hero}.',
        "{hero.He} held {hero.his} {colour} {toy} very tight.",
    ],
    "noise_decide": [
        'But then {hero.he} thought, "I want to know what it is."',
        "But {hero} was more curious than afraid.",
        "{hero.He} counted to ten and put {hero.his} feet on the cold floor.",
        "{hero.He} remembered what {hero.his} {helper} always said. Most things are small when you look at them.",
    ],
    "noise_walk": [
        "{hero.He} lit a candle and walked on the tips of {hero.his} toes.",
        "With a lamp in {hero.his} hand, {hero.he} went to look.",
        "Step by step {hero.he} came closer, and the {noise} grew louder.",
    ],
    "noise_cause": [
        "And what was it? It was only {noise.cause}!",
        "{hero.He} held up the light. There was no monster. There was only {noise.cause}.",
        "Then {hero.he} saw it. The {noise} came from {noise.cause}.",
    ],
    "noise_laugh": [
        "{hero} laughed out loud.",
        '"So it was you!" said {hero}, and {hero.he} had to laugh.',
        "All the fear was gone at once.",
        "{hero} let out a long breath and smiled.",
    ],
    "noise_end": [
        "In the morning {hero.he} told {hero.his} {helper} about it, and they both laughed.",
        "{hero.He} went back to bed and was not afraid any more.",
        "The next night {hero} heard the {noise} again and just turned over.",
        '"You were very brave," said {hero.his} {helper} the next morning.',
    ],
}

_GARDEN: Mapping[str, Sequence[str]] = {
    "garden": [
        "<garden_seed> <garden_plant> <garden_wait> <sad> <garden_advice> <garden_care> <garden_grow>\n\n<joy> "
        "{plant.use} <garden_end> <close_alone>",
    ],
    "garden_seed": [
        "{time.Plain} {hero.his} {helper} gave {hero.him} a tiny seed. It was the seed of {plant.a}.",
        "{time.Plain} {hero} found a seed in {hero.his} pocket. {hero.His} {helper} said it was {plant.a} seed.",
        '{time.Plain} {hero} got a small bag from {hero.his} {helper}. "In it is {plant.a}," {helper.he} said, but '
        "{hero} saw only a seed.",
    ],
    "garden_plant": [
        "{hero} dug a hole {yard} and put the seed into the soft earth.",
        "{hero} planted it {yard} and gave it some water.",
        "So {hero.he} made a little bed of earth {yard} and laid the seed in it.",
    ],
    "garden_wait": [
        "The next day nothing had happened. The day after that, nothing had happened either.",
        "{hero} waited and waited, but the ground stayed bare.",
        "A whole week went by, and there was still nothing to see.",
    ],
    "garden_advice": [
        '"Good things need time," said {hero.his} {helper}.',
        '"A seed works in the dark, where we cannot see it," {hero.his} {helper} said.',
        '"Do not dig it up," said {hero.his} {helper}. "Give it water and wait."',
    ],
    "garden_care": [
        "So {hero} watered it every morning and pulled out the weeds.",
        "So {hero} sang to the seed every evening.",
        "{hero} built a small fence around it, to keep the chickens away.",
        "Every day {hero} carried water from the well.",
    ],
    "garden_grow": [
        "Then one day there was a small green leaf. It grew and grew, until the {plant} was {plant.grown}.",
        "And one morning something green looked out of the ground. By the end of summer the {plant} was {plant.grown}.",
        "After the rain a green tip came up. Week after week it grew, and at last the {plant} was {plant.grown}.",
    ],
    "garden_end": [
        '"I only had to wait," said {hero}.',
        "{hero} kept one seed for the next year.",
        "{hero.His} {helper} said that {hero.he} was a real gardener now.",
        "{hero} gave a seed to {hero.his} friend {friend}, so that {friend.he} could plant one too.",
    ],
}

_LEARNING: Mapping[str, Sequence[str]] = {
    "learning": [
        "<learn_wish> <learn_first> <learn_again> <sad> <learn_word> <learn_practice> <learn_done>\n\n<joy> "
        "<learn_end> <close_alone>",
        "<learn_wish> <learn_first> <learn_laugh> <sad> <friend_comes> <learn_friend> <learn_practice> <learn_done>\n\n"
        "<joy> <thanks> <close>",
    ],
    "learn_wish": [
        "{hero} wanted to learn how to {skill}.",
        "There was one thing that {hero} could not do. {hero.He} did not know how to {skill}.",
        '{time.Plain} {hero} said, "Today I will learn to {skill}."',
        "{hero.His} {helper} could {skill}, and {hero} wanted to do it too.",
    ],
    "learn_first": [
        "{hero.He} tried it for the first time and {skill.fails}.",
        "It looked easy, but {hero.he} {skill.fails}.",
        "The first time, {hero.he} {skill.fails}.",
    ],
    "learn_again": [
        "{hero.He} tried again, and it was no better.",
        "The second time was even worse.",
        "The second time, {hero.he} {skill.fails} again.",
    ],
    "learn_laugh": [
        "Some of the others laughed at {hero.him}.",
        '"You will never do it," said a big crow on the fence.',
        '"Maybe I am too small," {hero.he} thought.',
    ],
    "learn_word": [
        '"Nobody can do it at once," said {hero.his} {helper}.',
        '"I needed a whole year," {hero.his} {helper} said. "Try it a little every day."',
        '"Every mistake is a small step," said {hero.his} {helper}.',
    ],
    "learn_friend": [
        '"I fell down a hundred times before I could do it," said {friend}.',
        '"Watch me, and then do it slowly," said {friend}.',
        '{friend} did not laugh. "I will show you how {skill.doing} works," {friend.he} said.',
    ],
    "learn_practice": [
        "So {hero} went on {skill.doing} every day, in the sun and in the rain.",
        "Day after day {hero} practised, and each day it went a little better.",
        "{hero} practised in the morning and {hero.he} practised in the evening.",
    ],
    "learn_done": [
        "And then, one fine day, {hero.he} {skill.done}.",
        "After three weeks {hero.he} {skill.done}, and everyone clapped.",
        "At last the day came when {hero.he} {skill.done} without any help.",
    ],
    "learn_end": [
        '"You see?" said {hero.his} {helper}. "You did not give up."',
        '"Now I can teach somebody else," said {hero}.',
        "Now {hero} knew that {hero.he} could learn anything.",
        "{hero.His} {helper} was proud, and {hero} was even prouder.",
    ],
}

_FINDER: Mapping[str, Sequence[str]] = {
    "honest_finder": [
        "<find_find> <find_tempt> <find_think> <find_ask> <find_owner>\n\n<find_give> <find_reward> <find_end> "
        "<close_alone>",
    ],
    "find_find": [
        "{time.Plain} {hero} was walking to {spot} when {hero.he} saw something {yard}. It was {find.a}.",
        "{time.Plain} {hero} found {find.a} {yard}.",
        "{time.Plain}, on the way to {spot}, {hero.his} foot hit something. It was {find.a}.",
    ],
    "find_tempt": [
        '"How beautiful," {hero.he} thought. "Nobody would know if I kept it."',
        "{hero.He} looked around, but there was nobody to be seen.",
        "{hero} had never held anything so fine.",
        "For a moment {hero.he} wanted to keep it.",
    ],
    "find_think": [
        'Then {hero.he} thought, "Somebody must be very sad without it."',
        'But {hero.his} {helper} always said, "What you find belongs to someone."',
        "But {hero} knew what was right.",
        "Then {hero.he} thought of the day when {hero.he} had lost {hero.his} own {colour} {toy}.",
    ],
    "find_ask": [
        "So {hero.he} went from door to door and asked everyone.",
        "So {hero.he} asked {hero.his} friend {friend}, but {friend.he} did not know whose it was.",
        "{hero} asked at the market and {hero.he} asked at the mill.",
    ],
    "find_owner": [
        "At the last house lived the {owner}. {owner.He} had been looking for it all day.",
        "In the end {hero.he} met the {owner}, who was searching the ground with {owner.his} eyes.",
        'Then {hero.he} saw the {owner}. "I have lost something dear to me," {owner.he} said.',
    ],
    "find_give": [
        '"Is this yours?" asked {hero}, and {hero.he} held out {hero.his} hand.',
        "{hero} gave it back at once.",
        '"I think this belongs to you," said {hero}.',
    ],
    "find_reward": [
        "The {owner} was so glad that {owner.he} gave {hero.him} {food.a}.",
        '"You are honest and good," said the {owner}. "Thank you with all my heart."',
        "The {owner} shook {hero.his} hand for a long time.",
        '"My mother gave it to me when I was small," said the {owner}.',
    ],
    "find_end": [
        "{hero} did not need any other reward.",
        "{hero} walked home with empty hands and a full heart.",
        "After that, the {owner} always had a smile for {hero.him}.",
        '"It feels good to do the right thing," thought {hero}.',
    ],
}

_JOURNEY: Mapping[str, Sequence[str]] = {
    "journey": [
        "<way_plan> <way_block> <way_worry> <way_think> <way_cross> <way_go>\n\n<way_arrive> <way_share> <close>",
    ],
    "way_plan": [
        "{time.Plain} {hero} and {friend} wanted to go to {spot}.",
        '{time.Plain} {friend} knocked at the door. "Let us go to {spot}," {friend.he} said, and {hero} packed a bag.',
        "{time.Plain} {hero} set out for {spot} with {friend}.",
    ],
    "way_block": [
        "They sang as they walked, until they came to {obstacle.a}.",
        "Everything went well until {obstacle.a} lay before them.",
        "But after an hour {obstacle.a} blocked the way.",
    ],
    "way_worry": [
        '"We will never get past it," said {friend}.',
        '"Shall we go back?" asked {friend}.',
        "{friend} was {feeling} and sat down on a stone.",
        "They tried to go on, but it was too dangerous.",
    ],
    "way_think": [
        'But {hero} did not want to give up. "There is always a way," {hero.he} said.',
        "{hero} looked to the left and to the right, and {hero.he} thought hard.",
        '"Wait," said {hero}. "Let me think."',
    ],
    "way_cross": [
        "Not far away {hero.he} found {obstacle.help}. They {obstacle.deed}.",
        "Then {hero.he} saw {obstacle.help}, and a moment later they {obstacle.deed}.",
        '"Look over there!" {hero.he} cried. There was {obstacle.help}. So they {obstacle.deed}.',
    ],
    "way_go": [
        "On the other side the sun was shining.",
        "Then they went on, faster than before.",
        '"You are so clever," said {friend}.',
        "They held hands for the rest of the way.",
    ],
    "way_arrive": [
        "When they arrived, they were tired and happy.",
        "In the afternoon they were there at last.",
        "It was even more beautiful than they had thought.",
        '"We have done it!" cried {friend}.',
    ],
    "way_share": [
        "They sat down in the shade and shared {food.a}.",
        "{hero} took {food.a} out of the bag, and they each had half.",
        "They stayed there {pastime} until it was time to go home.",
        '"The way was the best part," said {friend}.',
    ],
}

_RAINY: Mapping[str, Sequence[str]] = {
    "rainy_day": [
        "<rain_plan> <rain_falls> <sad> <rain_idea> <rain_build> <rain_play>\n\n<rain_helper> <rain_end> <close>",
    ],
    "rain_plan": [
        "{hero} and {friend} had a plan. They wanted to go to {spot}.",
        "All week long, {hero} and {friend} had been looking forward to a trip to {spot}.",
        "{friend} came to visit {hero}, and they wanted to play outside.",
    ],
    "rain_falls": [
        "But dark clouds came, and it began to rain.",
        "But the rain fell and fell and would not stop.",
        "But then there was thunder, and big drops ran down the window.",
    ],
    "rain_idea": [
        '"We can have fun inside," said {friend}. "Let us build {game.a}."',
        'Then {friend} had an idea. "We can make {game.a}," {friend.he} said.',
        '"I know what we can do," said {friend}. "Have you ever made {game.a} in the house?"',
    ],
    "rain_build": [
        "They took {game.out} and built {game.a} in the middle of the room.",
        "Out of {game.out} they made the finest {game} in the world.",
        "They looked for {game.out}, and soon the {game} was ready.",
    ],
    "rain_play": [
        "In their game {game.game}.",
        "They played that {game.game}.",
        "Inside the {game}, {game.game}, and nobody heard the rain.",
    ],
    "rain_helper": [
        "Then {hero.his} {helper} looked in and brought {food.a} for each of them.",
        '"May I play too?" asked {hero.his} {helper}, and of course {helper.he} could.',
        "{hero.His} {helper} heard them laugh and had to laugh too.",
    ],
    "rain_end": [
        "When the rain stopped, they did not even notice.",
        '"I hope it rains tomorrow too," said {hero}.',
        "Later a rainbow stood over the hills, and they ran out to see it.",
        '"This was the best day of the week," said {friend}.',
    ],
}

PRODUCTIONS: Mapping[str, Sequence[str]] = {
    **_FRAME, **_LOST, **_STUCK, **_BROKEN, **_NEWCOMER, **_FAR_FROM_HOME, **_PRESENT, **_NOISE, **_GARDEN, **_LEARNING,
    **_FINDER, **_JOURNEY, **_RAINY,
}  # fmt: skip
